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
    compared: dict[str, Callable[[Visit], object]] = {
        "models-differ": lambda seen: sorted(seen.models) or None,
        "tokenizers-differ": lambda seen: seen.text_ids,
        "templates-differ": lambda seen: seen.chat_ids,
        "block-sizes-differ": lambda seen: seen.block_size,
        "lengths-differ": lambda seen: seen.max_model_len,
    }
    for code, value in compared.items():
        known = [(seen, value(seen)) for seen in visits if value(seen) is not None]
        odd = next((seen for seen, found in known if found != known[0][1]), None)
        if odd is not None:
            yield broken(code, odd.url, other=known[0][0].url)


def announced(visits: Sequence[Visit], cases: Sequence[Case]) -> Iterator[Finding]:
    """Whether what engines computed was announced, by the right ones, and no more than they can have."""
    listening = [case for case in cases if case.subscription.counters.connections]
    if not listening:
        return
    for at, seen in enumerate(visits):
        if not seen.probe_ids:
            continue
        by = [case for case in listening if _heard(case, seen.probe_ids)]
        for case in by:
            report = judge(case.checker.facts(), device_blocks=seen.device_blocks)
            over = [found for found in report.findings if found.code == "over-capacity" and found.broken]
            yield from (msgspec.structs.replace(found, where=case.name) for found in over)
        if not by:
            yield broken("unannounced", seen.url, tokens=len(seen.probe_ids), streams=len(listening))
        elif len(cases) == len(visits) and cases[at] not in by:
            yield broken("crossed", seen.url, there=by[0].name, here=cases[at].name)


def _heard(case: Case, prompt: Sequence[int]) -> bool:
    return any(text.size and text.tokens[: text.size] == tuple(prompt[: text.size]) for text in case.texts)
