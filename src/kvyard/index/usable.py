"""How long a prefix all groups of a holder can use: the block manager's rule, asked from outside.

The rules themselves are ``kvyard.blocks.rules``; here they are given intervals from the index instead of the manager's map,
and are iterated as the manager's coordinator does. Tests hold the two against each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvyard.blocks.rules import Match, Rule, Spans, intersect, rule_for
from kvyard.blocks.spec import GroupSpec
from kvyard.index.backend import Rows
from kvyard.index.catalog import Layout


class _Batch:
    """Groups of equal kind and size: they hit only where all of them do."""

    def __init__(self, members: list[int], spec: GroupSpec, drop: bool) -> None:
        self.members = members
        self.rule: Rule = rule_for(spec)
        self.spec = spec
        self.drop = drop


class Usable:
    """The rules of one layout, against an index of ``block_size``."""

    def __init__(self, layout: Layout, block_size: int) -> None:
        self.layout = layout
        self.block_size = block_size
        self.alignment = layout.alignment
        by_spec: dict[tuple[object, ...], list[int]] = {}
        for at, spec in enumerate(layout.specs):
            key = (spec.kind, spec.block_size, spec.window, spec.chunk, spec.mode, spec.spec_blocks)
            by_spec.setdefault(key, []).append(at)
        self.batches = sorted(
            (
                _Batch(members, layout.specs[members[0]], any(layout.specs[at].eagle for at in members))
                for members in by_spec.values()
            ),
            key=lambda batch: not batch.spec.is_full,
        )

    def spans(self, at: int, rows: Rows, mask: int) -> Spans:
        """The intervals, in blocks of the layout's group ``at``, that places in ``mask`` hold."""
        spec, ours = self.layout.specs[at], self.block_size
        size = spec.block_size
        spans: list[tuple[int, int]] = []
        start = low = 0
        open_ = False
        for stop, row in [*rows, (rows[-1][0], 0)] if rows else []:
            if row & mask:
                if not open_:
                    low, open_ = start, True
            elif open_:
                if spec.is_state:
                    _add_states(spans, low * ours, start * ours, ours, size)
                else:
                    _add(spans, -(-low * ours // size), start * ours // size)
                open_ = False
            start = stop
        return spans

    def longest(self, seen: Sequence[Spans], limit: int, end: int) -> int:
        """The longest prefix of at most ``limit`` tokens that every group can use; ``end`` is where the prompt's blocks do."""
        batches, alignment = self.batches, self.alignment
        spans: list[Spans] = []
        for batch in batches:
            both = seen[batch.members[0]]
            for at in batch.members[1:]:
                both = intersect(both, seen[at])
            spans.append(both)
        if len(batches) == 1 and len(self.layout.specs) == 1:
            return batches[0].rule.match(spans[0], limit, alignment, batches[0].drop).tokens
        matches: list[Match | None] = [None] * len(batches)
        dropped: set[int] = set()
        hit = limit
        one_round = len(batches) == 2 and batches[0].spec.is_full
        while True:
            candidate = hit
            for index, batch in enumerate(batches):
                known = matches[index]
                if batch.spec.is_full and known is not None:
                    candidate = min(candidate, known.tokens)
                    continue
                drop = batch.drop and index not in dropped
                reach = candidate
                if drop and not batch.spec.is_state:
                    reach = min(candidate + batch.spec.block_size, end)
                match = batch.rule.match(spans[index], reach, alignment, drop)
                if drop:
                    dropped.add(index)
                elif match.tokens < candidate:
                    dropped.clear()
                candidate = match.tokens
                matches[index] = match
            if candidate >= hit:
                break
            hit = candidate
            if one_round:
                break
        return hit

    def limiting(self, seen: Sequence[Spans], limit: int) -> int:
        """Which group (by position in the layout) reaches least far by itself."""
        reach = [
            (rule_for(spec).match(seen[at], limit, self.alignment, False).tokens, at)
            for at, spec in enumerate(self.layout.specs)
        ]
        return min(reach)[1]


def _add(spans: list[tuple[int, int]], low: int, high: int) -> None:
    if low < high:
        spans.append((low, high))


def _add_states(spans: list[tuple[int, int]], start: int, stop: int, ours: int, size: int) -> None:
    """States are points: block p of the group is there where ours ends at the same token, and is held."""
    step = math.lcm(ours, size)
    for end in range(start // step * step + step, stop + 1, step):
        low = end // size - 1
        if spans and spans[-1][1] == low:
            spans[-1] = (spans[-1][0], low + 1)
        else:
            spans.append((low, low + 1))
