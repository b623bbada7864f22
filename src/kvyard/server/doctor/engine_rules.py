"""Faults of engines, from visits: each compared with expectations, with each other, and with the streams that should
announce their blocks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from kvyard.events.check import Finding, judge
from kvyard.events.tier import Tier
from kvyard.hashing.prefix_tree import common_length
from kvyard.server.doctor.case import Case
from kvyard.server.doctor.finding import Expected, broken, note
from kvyard.server.doctor.visit import Visit

FAR_MS = 50.0
"""A round trip that is felt in every first token."""
SKEW_S = 2.0


class Local(msgspec.Struct, frozen=True, kw_only=True):
    """The texts in tokens, as made here; ``None`` if that wasn't asked for."""

    text_ids: list[int] | None = None
    bare_ids: list[int] | None = None
    """The text's without special tokens."""
    chat_ids: list[int] | None = None


def about_engines(
    visits: Sequence[Visit], cases: Sequence[Case], expected: Expected, local: Local
) -> Iterator[Finding]:
    """Yield all findings about engines: each by itself, and compared with each other and with streams. Changes nothing."""
    for seen in visits:
        if not seen.answered or seen.health != 200:
            yield from reached(seen)
        if not seen.answered:
            continue
        for rule in RULES:
            yield from rule(seen, expected, local)
    whole = [seen for seen in visits if seen.answered]
    yield from between(whole)
    live = [case for case in cases if case.live]
    yield from announced(whole, live)
    yield from capacity(device_blocks(whole, live), live)


def reached(seen: Visit) -> Iterator[Finding]:
    if seen.problem:
        yield broken("http-unreachable", seen.url, problem=seen.problem[:200])
    elif seen.unauthorised:
        yield broken("token", seen.url)
    else:
        yield broken("unhealthy", seen.url, health=seen.health)


def model(seen: Visit, expected: Expected, local: Local) -> Iterator[Finding]:
    if expected.model is not None and expected.model not in seen.models:
        names = ", ".join(map(repr, seen.models[:8])) or "none"
        yield broken("model", seen.url, names=names, model=expected.model)


def tokenizer(seen: Visit, expected: Expected, local: Local) -> Iterator[Finding]:
    if seen.text_ids is None:
        yield note("no-tokenize", seen.url, why=seen.failed.get("/tokenize (text)", "its answer has none"))
        return
    ours = local.text_ids
    if ours is None or ours == seen.text_ids:
        return
    bare = local.bare_ids or ours
    if seen.text_ids[1:] == ours or ours[1:] == seen.text_ids or bare == seen.text_ids:
        yield broken("first-token.engine", seen.url)
    else:
        yield broken("tokenizer", seen.url, tokens=len(seen.text_ids), at=common_length(ours, seen.text_ids))


def template(seen: Visit, expected: Expected, local: Local) -> Iterator[Finding]:
    ours, theirs = local.chat_ids, seen.chat_ids
    if ours is not None and theirs is not None and ours != theirs:
        yield broken("template.local", seen.url, theirs=len(theirs), ours=len(ours), at=common_length(ours, theirs))
    if theirs is not None and seen.chat_tokens is not None and seen.chat_tokens != len(theirs):
        yield broken("template.tokenize", seen.url, theirs=len(theirs), chat=seen.chat_tokens)


def block_size(seen: Visit, expected: Expected, local: Local) -> Iterator[Finding]:
    size, want = seen.block_size, expected.block_size
    if want is not None and size is not None and size != want:
        yield broken("block-size.metrics", seen.url, size=size, want=want)
    elif size is None and want is not None and seen.prompt_tokens is not None and len(seen.cached) > 1:
        cached = seen.cached[1]
        if cached and cached != (seen.prompt_tokens - 1) // want * want:
            yield broken("block-size.cached", seen.url, tokens=seen.prompt_tokens, cached=cached, want=want)


def caching(seen: Visit, expected: Expected, local: Local) -> Iterator[Finding]:
    off = seen.cache.get("enable_prefix_caching", "").lower() == "false"
    first, second, salted = [*seen.cached, None, None, None][:3]
    answered = "the second completion" not in seen.failed
    if off or second == 0 or (second is None and seen.hits == 0 and answered):
        metrics = "Its metrics say enable_prefix_caching=False."
        proof = metrics if off else "The same prompt, sent twice, was computed twice."
        large = ", and give --block-size if its blocks are large: prompts must fill one"
        yield broken("caching-off", seen.url, proof=proof, large="" if seen.block_size else large)
        return
    if seen.cached and second is None and answered:
        metrics = f" Its metrics do: {seen.hits:.0f} tokens the second time." if seen.hits else ""
        yield note("no-cached-tokens", seen.url, metrics=metrics)
    if first:
        yield note("foreign-hit", seen.url, cached=first)
    if salted:
        yield broken("salt-ignored", seen.url, cached=salted)


def asleep(seen: Visit, expected: Expected, local: Local) -> Iterator[Finding]:
    if seen.asleep:
        yield broken("asleep", seen.url)


def answers(seen: Visit, expected: Expected, local: Local) -> Iterator[Finding]:
    if "the first completion" in seen.failed:
        yield broken("no-answer.completion", seen.url, why=seen.failed["the first completion"])
    if "a chat" in seen.failed:
        yield note("no-answer.chat", seen.url, why=seen.failed["a chat"])


def distance(seen: Visit, expected: Expected, local: Local) -> Iterator[Finding]:
    if seen.round_trip_ms is not None and seen.round_trip_ms > FAR_MS:
        yield note("far", seen.url, ms=seen.round_trip_ms)
    if seen.skew_s is not None and abs(seen.skew_s) > SKEW_S:
        yield note("clock", seen.url, seconds=abs(seen.skew_s), way="ahead of" if seen.skew_s > 0 else "behind")


RULES: list[Callable[[Visit, Expected, Local], Iterator[Finding]]] = [
    model,
    tokenizer,
    template,
    block_size,
    asleep,
    answers,
    caching,
    distance,
]


def between(visits: Sequence[Visit]) -> Iterator[Finding]:
    """Yield differences between engines of one pool."""
    compared: dict[str, Callable[[Visit], object]] = {
        "models-differ": lambda seen: sorted(seen.models) or None,
        "tokenizers-differ": lambda seen: seen.text_ids,
        "templates-differ": lambda seen: seen.chat_ids,
        "block-sizes-differ": lambda seen: seen.block_size,
        "lengths-differ": lambda seen: seen.max_model_len,
    }
    for code, value in compared.items():
        known = [(seen, value(seen)) for seen in visits if value(seen) is not None]
        odd = next((seen for seen, value in known if value != known[0][1]), None)
        if odd is not None:
            yield broken(code, odd.url, other=known[0][0].url)


def device_blocks(visits: Sequence[Visit], cases: Sequence[Case]) -> dict[str, int]:
    """Return blocks of the device per stream, as the metrics of its engine have them: the engine whose prompt it announced,
    or if none was sent the one at the same place in the order.
    """
    blocks: dict[str, int] = {}
    for index, seen in enumerate(visits):
        if seen.device_blocks is None:
            continue
        if seen.probe_ids:
            own = [case for case in cases if _heard(case, seen.probe_ids)]
        else:
            own = [cases[index]] if len(cases) == len(visits) else []
        blocks |= {case.name: seen.device_blocks for case in own}
    return blocks


def capacity(blocks: Mapping[str, int], cases: Sequence[Case]) -> Iterator[Finding]:
    """Yield a finding for each stream that announces more than its device has, by its own batches or with those that were
    fetched.
    """
    for case in cases:
        if case.name not in blocks:
            continue
        engine = case.checker.facts().guess.engine()
        for checker in (case.followed, case.checker):
            report = judge(checker.facts(), engine, device_blocks=blocks[case.name])
            over = [finding for finding in report.findings if finding.code == "over-capacity" and finding.broken]
            if over:
                yield from (msgspec.structs.replace(finding, where=case.name) for finding in over)
                break


def announced(visits: Sequence[Visit], cases: Sequence[Case]) -> Iterator[Finding]:
    """Yield findings about announcements of what engines computed: by the right ones, and on the device."""
    listening = [case for case in cases if case.subscription.counters.connections]
    if not listening:
        return
    for index, seen in enumerate(visits):
        if not seen.probe_ids:
            continue
        by = [case for case in listening if _heard(case, seen.probe_ids)]
        for case in by:
            yield from _tiers(case, seen.probe_ids)
        if not by:
            yield broken("unannounced", seen.url, tokens=len(seen.probe_ids), streams=len(listening))
        elif len(cases) == len(visits) and cases[index] not in by:
            yield broken("crossed", seen.url, there=by[0].name, here=cases[index].name)


def _tiers(case: Case, prompt: Sequence[int]) -> Iterator[Finding]:
    """Yield a finding if newly computed blocks aren't announced on the device."""
    tiers = {text.tier for text in case.texts if text.size and text.tokens[: text.size] == tuple(prompt[: text.size])}
    if tiers and Tier.G1 not in tiers:
        yield broken("tier-named", case.name, stream=case.name, tier=min(tiers).place)


def _heard(case: Case, prompt: Sequence[int]) -> bool:
    return any(text.size and text.tokens[: text.size] == tuple(prompt[: text.size]) for text in case.texts)
