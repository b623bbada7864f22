"""Causes that keep a prompt from matching a stream: no publisher, nothing sent, not readable, not whole, cleared too often;
and where the stream is well, the prompt's length, its text, its adapter or salt, an attention group, or the hashes. Faults
that a stream shows by itself are found by ``kvyard.events.check``.
"""

from collections.abc import Iterator, Sequence

import msgspec

from kvyard.clock import SECOND
from kvyard.events.check import Finding, Severity, judge
from kvyard.events.transport import State
from kvyard.hashing import ALGORITHMS, HashingError, algorithm, wire_hash
from kvyard.hashing.prefix_tree import common_length
from kvyard.server.doctor.case import Case, Text
from kvyard.server.doctor.finding import Expected, broken, note


def block_size(case: Case, expected: Expected) -> Iterator[Finding]:
    sizes = sorted({size for known in case.checker.facts().block_sizes.values() for size in known})
    if not sizes and case.block_size is not None:
        sizes = [case.block_size]
    want, size = expected.block_size, case.block_size
    if want is not None and sizes and want not in sizes:
        yield broken("block-size.stream", case.name, heard=", ".join(map(str, sizes)), size=sizes[0], want=want)
    if case.prompt is not None and size is not None and len(case.prompt) <= size:
        yield broken("below-one-block", case.name, tokens=len(case.prompt), size=size)


def namespace(case: Case, expected: Expected) -> Iterator[Finding]:
    if not _long_enough(case) or any(match.tokens for match in case.matches()) or not case.blind_match():
        return
    assert case.prompt is not None
    same = [text for text in case.texts if _begins_alike(text, case.prompt)]
    theirs = sorted({_space(text) for text in same}) or ["something else"]
    code = "salt" if {text.lora for text in same} == {case.namespace.lora_name} else "lora"
    yield broken(code, case.name, theirs=" or ".join(theirs), ours=_asked_space(case))


def text(case: Case, expected: Expected) -> Iterator[Finding]:
    if not _long_enough(case) or any(match.tokens for match in case.matches()) or case.blind_match():
        return
    assert case.prompt is not None and case.block_size is not None
    if case.most:
        yield broken("evicted", case.name, tokens=case.most)
        return
    if not case.texts:
        return
    size, prompt = case.block_size, tuple(case.prompt)
    longer = [text for text in case.texts if text.tokens[1 : size + 1] == prompt[: len(text.tokens) - 1][:size]]
    if any(text.tokens[:size] == prompt[1 : size + 1] for text in case.texts):
        yield broken("first-token.prompt", case.name, more="one token less")
    elif any(len(text.tokens) >= size for text in longer):
        yield broken("first-token.prompt", case.name, more="one token more")
    else:
        agree = max(common_length(list(text.tokens), list(case.prompt)) for text in case.texts)
        name = "not-announced.parts" if agree else "not-announced.never"
        yield broken(name, case.name, prompts=len(case.texts), at=agree)


def groups(case: Case, expected: Expected) -> Iterator[Finding]:
    for reason in case.unknown_groups():
        if case.announced:
            yield broken("group.unknown", case.name, reason=reason)
    for holder, explanation in case.explanations():
        most = max((group.tokens for group in explanation.groups), default=0)
        worst = next((group for group in explanation.groups if not group.tokens), None)
        if len(explanation.groups) > 1 and worst is not None and most:
            yield broken(
                "group.empty",
                case.name,
                rank=holder.rank,
                group=worst.group,
                kind=worst.kind,
                most=most,
                stored=case.announced.get(worst.group, 0),
                why=worst.why,
            )


def _long_enough(case: Case) -> bool:
    return case.prompt is not None and case.block_size is not None and len(case.prompt) > case.block_size


def _begins_alike(text: Text, prompt: Sequence[int]) -> bool:
    size = min(text.size or len(text.tokens), len(text.tokens), len(prompt))
    return size > 0 and text.tokens[:size] == tuple(prompt[:size])


def _space(text: Text) -> str:
    parts = [f"adapter {text.lora!r}"] if text.lora is not None else []
    parts += ["a salt"] if text.salted else []
    parts += ["media or other keys"] if text.media else []
    return " and ".join(parts) or "none of adapter, salt and media"


def _asked_space(case: Case) -> str:
    space = case.namespace
    parts = [f"adapter {space.lora_name!r}"] if space.lora_name is not None else []
    parts += ["another salt" if any(text.salted for text in case.texts) else "a salt"] if space.salt else []
    parts += ["media"] if space.media else []
    return " and ".join(parts) or "none of them"


STORM = 6.0
"""Clears a minute that no operator makes by hand."""
MORE = "`kvyard events check` says more about such streams."
SHOWN = (
    "encoding",
    "gap",
    "ranks",
    "restart",
    "orphan-parent",
    "repeated-remove",
    "empty-remove",
    "over-capacity",
    "never-removes",
)
"""Findings about the stream that matter when a prompt doesn't match."""
MEANT = {"message": "encoding", "unknown-kind": "encoding", "bad-gap": "gap", "bad-restart": "restart"}
"""Codes that are reported as one."""
HARMLESS = ("restart", "orphan-parent", "repeated-remove")
"""Findings that kvyard's own index copes with."""


def silence(case: Case) -> Iterator[Finding]:
    seconds = (case.ended - case.began) / SECOND
    if case.topics:
        names = ", ".join(repr(name) for name in sorted(case.topics)[:4])
        yield broken("topic", case.name, messages=case.topics.total(), topic=case.topic, names=names)
    elif not case.live:
        yield broken("no-events.recording", case.name)
    elif not case.subscription.counters.connections:
        yield broken("unreachable", case.name, seconds=seconds)
    else:
        yield broken("no-events.stream", case.name, seconds=seconds)
    yield from _replay(case)


def stream(case: Case, expected: Expected) -> Iterator[Finding]:
    """Yield findings of ``kvyard events check`` that keep prompts from matching."""
    statuses = case.subscription.statuses()
    whole = bool(statuses) and not any(status.state == State.STALE for status in statuses)
    report = judge(case.checker.facts(), recovered=whole)
    for finding in report.findings:
        code = MEANT.get(finding.code, "encoding" if finding.code.startswith("bad-") else finding.code)
        if code not in SHOWN or (not finding.broken and code != "gap"):
            continue
        finding = msgspec.structs.replace(finding, code=code, where=case.name, fix=finding.fix or MORE)
        if code == "encoding":
            means = "This isn't an encoding of KV events that is known."
            finding = msgspec.structs.replace(
                finding,
                means=finding.means or "They are lost." if report.facts.stored_blocks else means,
                fix="See that the endpoint is the engine's KV event socket and no other, and that the engine's version is "
                "known to its readers. " + MORE,
            )
        elif code in HARMLESS:
            finding = msgspec.structs.replace(finding, severity=Severity.NOTE)
        yield finding
    for reason in case.refused():
        yield note("refused", case.name, reason=reason)


def trust(case: Case, expected: Expected) -> Iterator[Finding]:
    """Yield findings about earlier and missed batches that aren't available."""
    streams = case.checker.facts().streams.values()
    joined = [stream_facts for stream_facts in streams if stream_facts.first]
    stale = [status for status in case.subscription.statuses() if status.state == State.STALE]
    if joined and case.replay is None:
        matched = any(match.tokens for match in case.matches())
        yield (note if matched else broken)("stale.joined", case.name, first=joined[0].first)
    elif stale and not joined and not any(stream_facts.gap_count for stream_facts in streams):
        yield broken("stale.lost", case.name, reason=stale[0].reason)
    yield from _replay(case)


def _replay(case: Case) -> Iterator[Finding]:
    if case.replay is None or not case.live:
        return
    counters = [status.counters for status in case.subscription.statuses()]
    brought = sum(counted.replayed + counted.snapshots for counted in counters)
    timeouts = sum(counted.timeouts for counted in counters)
    if case.replay_answers is False or (timeouts and not brought and not case.replay_answers):
        asked = f"{timeouts} requests to {case.replay} were" if timeouts else f"A request to {case.replay} was"
        yield broken("replay-silent", case.name, asked=asked)


def clears(case: Case, expected: Expected) -> Iterator[Finding]:
    count = len(case.clears)
    minutes = max((case.ended - case.began) / SECOND / 60, 1 / 60)
    if count >= 3 and count / minutes > STORM:
        yield broken("clear-storm", case.name, count=count, seconds=minutes * 60, blocks=case.cleared_blocks)


SEEDS = (None, "0", "1", "42", "random", "")
"""Texts of PYTHONHASHSEED that people use; ``None`` is the engine's own default."""


def hashes(case: Case, expected: Expected) -> Iterator[Finding]:
    samples = [text for text in case.texts if text.plain and text.size and len(text.tokens) >= text.size][:16]
    if not samples:
        return
    algorithm = _reproduced(samples)
    if expected.algorithm is not None and not all(
        _reproduces(expected.algorithm, expected.seed, text) for text in samples
    ):
        yield broken(
            "hash-seed",
            case.name,
            expected=_named(expected.algorithm, expected.seed),
            found=f", but of {algorithm}" if algorithm else "",
            fix=f": here {algorithm}"
            if algorithm
            else ", and tell the index; or let the index translate, which needs neither",
        )
    else:
        yield note("hashes.known" if algorithm else "hashes.unknown", case.name, found=algorithm)


def seeds_differ(cases: Sequence[Case]) -> Iterator[Finding]:
    """Yield findings that show only when engines are compared."""
    seen: dict[tuple[int, tuple[int, ...]], tuple[str, int]] = {}
    for case in cases:
        for text in case.texts:
            if not text.plain or not text.size or len(text.tokens) < text.size:
                continue
            key = (text.size, text.tokens[: text.size])
            other = seen.setdefault(key, (case.name, wire_hash(text.key)))
            if other[1] != wire_hash(text.key) and other[0] != case.name:
                yield note("seeds-differ", case.name, other=other[0])
                return


def _named(algorithm: str, seed: str | None) -> str:
    return f"{algorithm} with {'its default seed' if seed is None else f'seed {seed!r}'}"


def _reproduced(samples: Sequence[Text]) -> str:
    for name in sorted(ALGORITHMS):
        for seed in SEEDS:
            if all(_reproduces(name, seed, text) for text in samples):
                return _named(name, seed)
    return ""


def _reproduces(name: str, seed: str | None, text: Text) -> bool:
    try:
        keys = algorithm(name, seed, {}).hash_blocks(None, list(text.tokens[: text.size]), text.size)
    except HashingError:
        return False
    return wire_hash(keys[0]) == wire_hash(text.key)
