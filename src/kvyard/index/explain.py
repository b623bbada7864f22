"""Explanations: why a worker matched as much as it did and no more, group by group, in words.

Silent zeros are what people ask about most. So for every group of a worker this names the first block that it lacked and
what the index knows of that block. It can't know the past: a block that was evicted and one that was never computed look
the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvyard.index.backend import Rows
from kvyard.index.places import Holder, Places
from kvyard.index.scorer import Scorer, WorkerMatch
from kvyard.index.views import WorkerView

MOST_NAMES = 4


class GroupReach(msgspec.Struct, frozen=True, kw_only=True):
    """How far one group goes by itself, and why not further."""

    group: int | None
    kind: str
    tokens: int
    why: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's answer and its reasons."""

    match: WorkerMatch
    groups: list[GroupReach]
    summary: str


def explain(
    scorer: Scorer, places: Places, keys: Sequence[int], tokens: int | None, worker: Holder, now: int = 0
) -> Explanation:
    """Why ``worker`` matches what it does. Changes nothing."""
    match = scorer.score(keys, tokens, [worker], now).workers[worker]
    view = scorer.views.all.get(worker)
    size = scorer.block_size
    end = len(keys) * size
    length = end if tokens is None else tokens
    if view is None:
        return Explanation(match=match, groups=[], summary=f"{worker} earns nothing: {match.reason}")
    if not keys:
        return Explanation(match=match, groups=[], summary=f"{length} tokens don't fill one block of {size}")
    # All of the prompt, since what comes after a hole may explain it.
    rows = scorer.backend.lookup(keys, True)
    limit = end if tokens is None else max(0, min(end, tokens - 1))
    groups: list[GroupReach] = []
    for at, (group, spec, mask) in enumerate(zip(view.layout.groups, view.layout.specs, view.widest, strict=True)):
        spans = view.spans(at, rows, mask)
        reach = spec.rule().match(spans, limit, view.layout.alignment, spec.eagle).tokens
        if reach + view.layout.alignment > limit:
            why = "it has all that could be used"
        elif not spec.is_full and spans:
            held = ", ".join(f"{low * spec.block_size}..{high * spec.block_size}" for low, high in spans[-3:])
            why = f"of the tokens it needs it has only {held}"
        else:
            why = _why_missing(scorer, places, view, rows, reach // size, mask)
        groups.append(GroupReach(group=group, kind=spec.kind, tokens=reach, why=why))
    return Explanation(match=match, groups=groups, summary=_summary(match, groups, limit))


def _why_missing(scorer: Scorer, places: Places, view: WorkerView, rows: Rows, block: int, mask: int) -> str:
    """What is known of the first block that a group lacks."""
    row = next((held for stop, held in rows if block < stop), 0)
    name = f"block {block}"
    if not row:
        return f"nobody holds {name}: never computed, evicted, or another adapter, salt or medium"
    mine = [place for place in places.names(row & ~mask) if _belongs(place.holder, view.worker, places)]
    for place in mine:
        if place.tier not in scorer.weights:
            return f"{name} is on {place.tier.name}, which earns nothing here"
    if mine:
        if any(row & other for other in view.widest):
            return f"{name} is there for another group but not for this one"
        return f"{name} is there by a stream that can't be trusted now"
    others = sorted({str(place.holder) for place in places.names(row)})
    more = f" and {len(others) - MOST_NAMES} more" if len(others) > MOST_NAMES else ""
    return f"{name} is on {', '.join(others[:MOST_NAMES])}{more}"


def _belongs(holder: Holder, worker: Holder, places: Places) -> bool:
    return holder == worker or (holder.shared and worker in places.members.get(holder.name, ()))


def _summary(match: WorkerMatch, groups: list[GroupReach], limit: int) -> str:
    text = f"{match.worker} could use {match.tokens} of {limit} tokens"
    if not match.confidence:
        return f"{text}, but earns nothing: {match.reason}"
    short = [found for found in groups if found.group == match.limited_by]
    return f"{text}; {short[0].kind} group: {short[0].why}" if short and match.tokens < limit else text
