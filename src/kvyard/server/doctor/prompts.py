"""What keeps a prompt from matching a stream that is well: its length, its text, its adapter or salt, or an attention group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvyard.events.check import Finding
from kvyard.server.doctor.case import Case, Text
from kvyard.server.doctor.finding import Expected, broken, parting


def block_size(case: Case, expected: Expected) -> Iterator[Finding]:
    sizes = sorted({size for found in case.checker.facts().block_sizes.values() for size in found})
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
        agree = max(parting(text.tokens, case.prompt) for text in case.texts)
        name = "not-announced.parts" if agree else "not-announced.never"
        yield broken(name, case.name, prompts=len(case.texts), at=agree)


def groups(case: Case, expected: Expected) -> Iterator[Finding]:
    for reason in case.unknown_groups():
        if case.announced:
            yield broken("group.unknown", case.name, reason=reason)
    for holder, explanation in case.explanations():
        most = max((found.tokens for found in explanation.groups), default=0)
        worst = next((found for found in explanation.groups if not found.tokens), None)
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
