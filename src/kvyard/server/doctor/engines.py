"""What is wrong with an engine, by what a visit showed: by itself, and against what is expected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvyard.events.check import Finding
from kvyard.server.doctor.finding import OTHER_SIZE, SHIFTED, Expected, broken, note, parting
from kvyard.server.doctor.visit import Visit

FAR_MS = 50.0
"""A round trip that is felt in every first token."""
SKEW_S = 2.0


class Local(msgspec.Struct, frozen=True, kw_only=True):
    """The same texts in tokens, as made here; ``None`` where that wasn't asked for."""

    text_ids: list[int] | None = None
    bare_ids: list[int] | None = None
    """The text's without special tokens."""
    chat_ids: list[int] | None = None


def judge(visits: Sequence[Visit], expected: Expected, local: Local) -> Iterator[Finding]:
    """All findings about single engines. Changes nothing."""
    for seen in visits:
        if not seen.told or seen.health != 200:
            yield from reached(seen)
        if not seen.told:
            continue
        for rule in RULES:
            yield from rule(seen, expected, local)


def reached(seen: Visit) -> Iterator[Finding]:
    if seen.problem:
        yield broken(
            "http-unreachable",
            seen.url,
            f"It can't be talked to: {seen.problem[:200]}.",
            "No server listens there, it takes too long, or something in between is closed.",
            "Compare the address with the engine's --host and --port, and see whether it has finished loading.",
        )
    elif seen.unauthorised:
        yield broken(
            "token",
            seen.url,
            "It refuses to answer without the right key.",
            "A gateway without that key can't use it either.",
            "Give the engine's --api-key in a file with --token-file, to the gateway too.",
        )
    else:
        yield broken(
            "unhealthy",
            seen.url,
            f"/health answers {seen.health}.",
            "It isn't ready, or its engine died: gateways won't send it anything.",
            "See the engine's log.",
        )


def model(seen: Visit, expected: Expected, local: Local) -> Iterator[Finding]:
    if expected.model is not None and expected.model not in seen.models:
        names = ", ".join(map(repr, seen.models[:8])) or "none"
        yield broken(
            "model",
            seen.url,
            f"It serves {names}; {expected.model!r} is expected.",
            "Requests for that model are answered with 404 here.",
            f"Start it with --served-model-name {expected.model}, or put it into another pool.",
        )


def tokenizer(seen: Visit, expected: Expected, local: Local) -> Iterator[Finding]:
    if seen.text_ids is None:
        yield note(
            "no-tokenize",
            seen.url,
            f"/tokenize gives no ids: {seen.failed.get('/tokenize (text)', 'its answer has none')}.",
            "Its tokenizer and chat template can't be compared, and no gateway can ask it for ids.",
            "Give the gateway the model's tokenizer.json.",
        )
        return
    ours = local.text_ids
    if ours is None or ours == seen.text_ids:
        return
    bare = local.bare_ids or ours
    if seen.text_ids[1:] == ours or ours[1:] == seen.text_ids or bare == seen.text_ids:
        yield broken(
            "first-token",
            seen.url,
            "Its ids of a text differ from the local tokenizer's in the special tokens around it.",
            SHIFTED,
            "Tokenize as the engine does: --special or --no-special here, add_special_tokens in requests.",
        )
        return
    at = parting(ours, seen.text_ids)
    yield broken(
        "tokenizer",
        seen.url,
        f"Its ids of a text of {len(seen.text_ids)} tokens part from the local tokenizer's at token {at}.",
        "It is another tokenizer, or another version of it. Keys made with the local one match nothing here.",
        "Take tokenizer.json from the very model that the engine has loaded.",
    )


def template(seen: Visit, expected: Expected, local: Local) -> Iterator[Finding]:
    ours, theirs = local.chat_ids, seen.chat_ids
    if ours is not None and theirs is not None and ours != theirs:
        at = parting(ours, theirs)
        yield broken(
            "template",
            seen.url,
            f"Its ids of a conversation ({len(theirs)} tokens) part from the local template's ({len(ours)}) at token {at}.",
            "It applies another chat template, or the template has a default of its own (a system prompt, a date). "
            "Everything behind that token is another prompt.",
            "Give the engine and the router the same --chat-template; leave dates out of it.",
        )
    if theirs is not None and seen.chat_tokens is not None and seen.chat_tokens != len(theirs):
        yield broken(
            "template",
            seen.url,
            f"/tokenize makes {len(theirs)} tokens of a conversation, and a chat completion {seen.chat_tokens}.",
            "The two don't apply the template alike, so a router that asks /tokenize looks for another prompt.",
            "Pass the same template options to both (chat_template_kwargs, tools, add_generation_prompt), or tokenize locally.",
        )


def block_size(seen: Visit, expected: Expected, local: Local) -> Iterator[Finding]:
    size = seen.block_size
    want = expected.block_size
    if want is not None and size is not None and size != want:
        yield broken(
            "block-size",
            seen.url,
            f"Its metrics say blocks of {size} tokens; {want} is expected.",
            OTHER_SIZE,
            f"Set the router's block size to {size}, or the engine's --block-size to {want}.",
        )
    elif size is None and want is not None and seen.prompt_tokens is not None and len(seen.cached) > 1:
        cached = seen.cached[1]
        if cached and cached != (seen.prompt_tokens - 1) // want * want:
            yield broken(
                "block-size",
                seen.url,
                f"Of {seen.prompt_tokens} tokens {cached} were cached: not what blocks of {want} would give.",
                "Its blocks have another size, or its attention groups don't all keep what they computed.",
                "See the engine's --block-size, and the block_size of its events.",
            )


def caching(seen: Visit, expected: Expected, local: Local) -> Iterator[Finding]:
    off = seen.cache.get("enable_prefix_caching", "").lower() == "false"
    second = seen.cached[1] if len(seen.cached) > 1 else None
    answered = "the second completion" not in seen.failed
    if off or second == 0 or (second is None and seen.hits == 0 and answered):
        proof = (
            "Its metrics say enable_prefix_caching=False."
            if off
            else "The same prompt, sent twice, was computed twice."
        )
        yield broken(
            "caching-off",
            seen.url,
            proof,
            "Nothing is ever found again, so routing by cache gains nothing.",
            "Start it with prefix caching on (--enable-prefix-caching). See that its cache isn't full or reset all the time"
            + ("." if seen.block_size else ", and give --block-size if its blocks are large: prompts must fill one."),
        )
        return
    if seen.cached and second is None and answered:
        yield note(
            "no-cached-tokens",
            seen.url,
            "Its answers don't say how much of a prompt was cached."
            + (f" Its metrics do: {seen.hits:.0f} tokens the second time." if seen.hits else ""),
            "A gateway can't tell whether its guesses were right.",
            "Start it with --enable-prompt-tokens-details.",
        )
    if seen.cached[:1] and seen.cached[0]:
        yield note(
            "foreign-hit",
            seen.url,
            f"{seen.cached[0]} tokens of a prompt that was never sent before were cached.",
            "Its count of cached tokens isn't one of prefixes.",
            "Don't compare it with other engines' counts.",
        )
    salted = seen.cached[2] if len(seen.cached) > 2 else None
    if salted:
        yield broken(
            "salt-ignored",
            seen.url,
            f"{salted} tokens were found again under a cache_salt that was never used before.",
            "It takes no notice of salts: tenants that are meant to be apart share blocks, and can find out what others asked.",
            "Update the engine, or see what in between removes cache_salt from requests.",
        )


def answers(seen: Visit, expected: Expected, local: Local) -> Iterator[Finding]:
    if (what := "the first completion") in seen.failed:
        yield broken(
            "no-answer",
            seen.url,
            f"It refused {what}: {seen.failed[what]}.",
            "Prompts as plain text or token ids don't get through.",
            "See the engine's log, and what in between changes requests.",
        )
    if (what := "a chat") in seen.failed:
        yield note(
            "no-answer",
            seen.url,
            f"It refused {what}: {seen.failed[what]}.",
            "Chats don't get through; a base model has no template for them.",
            "Give it a --chat-template, if it is meant to chat.",
        )


def distance(seen: Visit, expected: Expected, local: Local) -> Iterator[Finding]:
    if seen.round_trip_ms is not None and seen.round_trip_ms > FAR_MS:
        yield note(
            "far",
            seen.url,
            f"A round trip takes {seen.round_trip_ms:.0f} ms.",
            "That is added to every first token; and its events come as late.",
            "Put router and engines into the same place, or see what in between is slow.",
        )
    if seen.skew_s is not None and abs(seen.skew_s) > SKEW_S:
        way = "ahead of" if seen.skew_s > 0 else "behind"
        yield note(
            "clock",
            seen.url,
            f"Its clock is {abs(seen.skew_s):.0f} s {way} the one here.",
            "Logs, metrics and the times in its events don't line up with those of others.",
            "Let all machines keep time by NTP.",
        )


RULES: list[Callable[[Visit, Expected, Local], Iterator[Finding]]] = [
    model,
    tokenizer,
    template,
    block_size,
    answers,
    caching,
    distance,
]
