"""What keeps a prompt from matching a stream that is well: its length, its text, its adapter or salt, or an attention group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvyard.events.check import Finding
from kvyard.server.doctor.case import Case, Text
from kvyard.server.doctor.finding import OTHER_SIZE, SHIFTED, Expected, broken, parting


def block_size(case: Case, expected: Expected) -> Iterator[Finding]:
    sizes = sorted({size for found in case.checker.facts().block_sizes.values() for size in found})
    if not sizes and case.block_size is not None:
        sizes = [case.block_size]
    if expected.block_size is not None and sizes and expected.block_size not in sizes:
        heard = ", ".join(map(str, sizes))
        yield broken(
            "block-size",
            case.name,
            f"The engine's blocks have {heard} tokens; {expected.block_size} is expected.",
            OTHER_SIZE,
            f"Set the router's block size to {sizes[0]}, or the engine's --block-size to {expected.block_size}.",
        )
    size = case.block_size
    if case.prompt is not None and size is not None and len(case.prompt) <= size:
        yield broken(
            "below-one-block",
            case.name,
            f"The prompt has {len(case.prompt)} tokens, and a block has {size}.",
            "Only full blocks are cached, and the last token is always computed: a prompt must be longer than a block.",
            f"Test with a prompt of more than {size} tokens.",
        )


def namespace(case: Case, expected: Expected) -> Iterator[Finding]:
    if not _long_enough(case) or any(match.tokens for match in case.matches()) or not case.blind_match():
        return
    assert case.prompt is not None and case.block_size is not None
    same = [text for text in case.texts if _begins_alike(text, case.prompt)]
    theirs = sorted({_space(text) for text in same}) or ["something else"]
    ours = _asked_space(case)
    adapter = case.namespace.lora_name
    loras = {text.lora for text in same}
    code = "salt" if loras == {adapter} else "lora"
    yield broken(
        code,
        case.name,
        f"The prompt's tokens are cached, but with {' or '.join(theirs)}; asked for was {ours}.",
        "An adapter, a salt or an image is part of a block's identity. With another one it is another block.",
        {
            "salt": "Ask with the same cache_salt as the request (--salt), or send requests without one.",
            "lora": "Ask with the adapter's name as the engine knows it (--lora), or for the base model without one.",
        }[code],
    )


def text(case: Case, expected: Expected) -> Iterator[Finding]:
    if not _long_enough(case) or any(match.tokens for match in case.matches()) or case.blind_match():
        return
    assert case.prompt is not None and case.block_size is not None
    if case.most:
        yield broken(
            "evicted",
            case.name,
            f"{case.most} tokens of the prompt were cached for a while, and are gone.",
            "Its blocks were evicted or cleared.",
            "More cache, or less traffic per engine.",
        )
        return
    if not case.texts:
        return
    size = case.block_size
    shifted = [
        text for text in case.texts if text.tokens[1 : size + 1] == tuple(case.prompt[: len(text.tokens) - 1][:size])
    ]
    extra = [text for text in case.texts if tuple(case.prompt[1 : size + 1]) == text.tokens[:size]]
    if any(len(text.tokens) >= size for text in shifted) or extra:
        more = "one token more at its start" if not extra else "one token less at its start"
        yield broken(
            "first-token",
            case.name,
            f"The engine's text is this prompt with {more}.",
            SHIFTED,
            "Tokenize as the engine does: with or without special tokens (--special / --no-special), after the same chat "
            "template.",
        )
        return
    agree = max(parting(text.tokens, case.prompt) for text in case.texts)
    if agree:
        seen = (
            f"The prompt and the closest of {len(case.texts)} announced ones part at token {agree}, in the first block."
        )
        means = "The text differs early: another chat template, system prompt, date, or tool list. No block can match."
    else:
        seen = f"None of {len(case.texts)} announced prompts begins like this one."
        means = "The engine never computed it while this was watched, or with other tokens from the first on."
    yield broken(
        "not-announced",
        case.name,
        seen,
        means,
        "Send this very prompt to the engine while watching. If it still isn't found, compare the token ids with the "
        "engine's own (/tokenize), special tokens and chat template included.",
    )


def groups(case: Case, expected: Expected) -> Iterator[Finding]:
    for reason in case.unknown_groups():
        if case.announced:
            yield broken(
                "group",
                case.name,
                f"The engine's attention groups aren't all known: {reason}.",
                "Without its rule a group can't be said to match, so the engine earns nothing.",
                "Configure the groups for this worker (groups in /register or the configuration).",
            )
    for holder, explanation in case.explanations():
        if len(explanation.groups) < 2:
            continue
        reaches = {found.group: found.tokens for found in explanation.groups}
        never = [found for found in explanation.groups if not found.tokens]
        if never and max(reaches.values()) > 0:
            worst = never[0]
            stored = case.announced.get(worst.group, 0)
            yield broken(
                "group",
                case.name,
                f"Rank {holder.rank}: group {worst.group} ({worst.kind}) matches nothing of the prompt, others up to "
                f"{max(reaches.values())} tokens; {stored} blocks were announced for it.",
                f"A hit needs every group, so this one keeps it at 0: {worst.why}.",
                "Windows and states are evicted by rules of their own. See the engine's retention settings, and that "
                "events carry group and kind.",
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
