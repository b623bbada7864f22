"""What shows only when engines are compared: with each other, and with the streams that should tell of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvyard.events.check import Finding, judge
from kvyard.server.doctor.case import Case
from kvyard.server.doctor.finding import broken
from kvyard.server.doctor.visit import Visit


def compare(visits: Sequence[Visit], cases: Sequence[Case]) -> Iterator[Finding]:
    """All findings about several of them. Changes nothing."""
    whole = [seen for seen in visits if seen.told]
    yield from between(whole)
    yield from announced(whole, [case for case in cases if case.live])


def between(visits: Sequence[Visit]) -> Iterator[Finding]:
    """How engines of one pool differ."""
    compared: list[tuple[str, str, Callable[[Visit], object], str, str]] = [
        (
            "models-differ",
            "serves other models",
            lambda seen: sorted(seen.models) or None,
            "A router that takes them for one pool sends requests to engines that refuse them.",
            "Give them the same --served-model-name, or a pool each.",
        ),
        (
            "tokenizers-differ",
            "makes other tokens of the same text",
            lambda seen: seen.text_ids,
            "One prompt has two names, so what one engine has cached is never found for the other's.",
            "Load the same model with the same tokenizer everywhere.",
        ),
        (
            "templates-differ",
            "makes another prompt of the same conversation",
            lambda seen: seen.chat_ids,
            "Which prompt a conversation becomes depends on who is asked.",
            "Give all of them the same --chat-template.",
        ),
        (
            "block-sizes-differ",
            "has blocks of another size",
            lambda seen: seen.block_size,
            "A router with one block size is wrong about one of them. kvyard's own index translates.",
            "Give all of them the same --block-size.",
        ),
        (
            "lengths-differ",
            "takes prompts of another length",
            lambda seen: seen.max_model_len,
            "A long request is served or refused, depending on where it goes.",
            "Give all of them the same --max-model-len.",
        ),
    ]
    for code, what, value, means, fix in compared:
        known = [(seen, value(seen)) for seen in visits if value(seen) is not None]
        odd = next((seen for seen, found in known if found != known[0][1]), None)
        if odd is not None:
            yield broken(code, odd.url, f"It {what} than {known[0][0].url}.", means, fix)


def announced(visits: Sequence[Visit], cases: Sequence[Case]) -> Iterator[Finding]:
    """Whether what engines computed was announced, and by the right ones."""
    listening = [case for case in cases if case.subscription.counters.connections]
    if not listening:
        return
    for at, seen in enumerate(visits):
        if not seen.probe_ids:
            continue
        by = [case for case in listening if _heard(case, seen.probe_ids)]
        for case in by:
            report = judge(case.checker.facts(), device_blocks=seen.device_blocks)
            yield from (
                msgspec.structs.replace(found, where=case.name)
                for found in report.findings
                if found.code == "over-capacity" and found.broken
            )
        if not by:
            yield broken(
                "unannounced",
                seen.url,
                f"It computed a prompt of {len(seen.probe_ids)} tokens, and none of the {len(listening)} streams told of it.",
                "Its events go elsewhere or nowhere: no index can know what it has.",
                "Compare the endpoints with its --kv-events-config. Of a data-parallel engine all ranks' endpoints are needed.",
            )
        elif len(cases) == len(visits) and cases[at] not in by:
            yield broken(
                "crossed",
                seen.url,
                f"What it computed was announced at {by[0].name}, not at {cases[at].name}, its place in the list.",
                "A router that goes by this order credits one engine with what another has: worse than knowing nothing.",
                "Put engines and endpoints into the same order, here and in the router's configuration.",
            )


def _heard(case: Case, prompt: Sequence[int]) -> bool:
    return any(text.size and text.tokens[: text.size] == tuple(prompt[: text.size]) for text in case.texts)
