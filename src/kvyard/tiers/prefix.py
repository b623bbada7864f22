"""How far a prompt can be had from the tiers together: a pure function of intervals.

Each group shows where its copies are, as intervals of its own blocks, whoever holds them. Full attention stops at the first
miss, a window needs its trailing interval, a state its boundary point; the answer is the longest length on which all of
them agree. The rules are the block manager's (``kvyard.blocks.rules``). Nothing here knows a store or a request.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvyard.blocks.rules import Match, Rule, Spans, clip, intersect, rule_for
from kvyard.blocks.spec import GroupSpec


class Agreement:
    """What a set of groups can agree on. Stateless after construction."""

    def __init__(self, specs: Sequence[GroupSpec], drops: Sequence[bool], alignment: int) -> None:
        """``drops``: which groups give up the last block found, for a draft head. A hit ends on ``alignment`` tokens."""
        self.alignment = alignment
        by_spec: dict[tuple[object, ...], list[int]] = {}
        for at, spec in enumerate(specs):
            key = (spec.kind, spec.block_size, spec.window, spec.chunk, spec.mode, spec.spec_blocks)
            by_spec.setdefault(key, []).append(at)
        batches = [_Batch(members, specs[members[0]], any(drops[at] for at in members)) for members in by_spec.values()]
        # Full attention first, since its answer bounds the others at little cost.
        self._batches = sorted(batches, key=lambda batch: not batch.is_full)

    def longest(self, spans: Sequence[Spans], limit: int, end: int) -> int:
        """The longest prefix of at most ``limit`` tokens that every group can use, given the intervals of each.

        ``end`` is how many tokens the prompt's full blocks have: a block that will be dropped may lie past ``limit``.
        """
        batches, alignment = self._batches, self.alignment
        if len(spans) == 1:
            batch = batches[0]
            return batch.rule.match(spans[0], limit, alignment, batch.drop).tokens
        seen = [batch.common(spans) for batch in batches]
        known: list[Match | None] = [None] * len(batches)
        dropped: set[int] = set()
        hit = limit
        while True:
            candidate = hit
            for index, batch in enumerate(batches):
                match = known[index]
                if batch.is_full and match is not None:
                    # Any shorter prefix will do for it.
                    candidate = min(candidate, match.tokens)
                    continue
                # A block is dropped once per candidate; otherwise the drop would repeat until nothing is left.
                drop = batch.drop and index not in dropped
                reach = min(candidate + batch.rule.block_size, end) if drop and not batch.is_state else candidate
                match = batch.rule.match(seen[index], reach, alignment, drop)
                if drop:
                    dropped.add(index)
                elif match.tokens < candidate:
                    dropped.clear()
                candidate = match.tokens
                known[index] = match
            if candidate >= hit:
                return hit
            hit = candidate


class _Batch:
    """Groups of equal kind and size: they hit only where all of them do."""

    def __init__(self, members: list[int], spec: GroupSpec, drop: bool) -> None:
        self.members = members
        self.rule: Rule = rule_for(spec)
        self.is_full = spec.is_full
        self.is_state = spec.is_state
        self.drop = drop

    def common(self, spans: Sequence[Spans]) -> Spans:
        both = spans[self.members[0]]
        for at in self.members[1:]:
            both = intersect(both, spans[at])
        return both


def unite(*spans: Spans) -> list[tuple[int, int]]:
    """The positions that are in any of ``spans``."""
    joined = [span for some in spans for span in some]
    return clip(joined, 0, max(high for _, high in joined)) if joined else joined


def without(low: int, high: int, spans: Spans) -> list[tuple[int, int]]:
    """The intervals of ``low`` to ``high`` that are not in ``spans``."""
    left: list[tuple[int, int]] = []
    for start, stop in spans:
        if stop <= low:
            continue
        if start >= high:
            break
        if start > low:
            left.append((low, start))
        low = stop
    if low < high:
        left.append((low, high))
    return left


def overlaps(low: int, high: int, spans: Spans) -> bool:
    """Whether any position of ``low`` to ``high`` is in ``spans``."""
    for start, stop in spans:
        if max(start, low) < min(stop, high):
            return True
    return False
