"""How long a prefix all groups of a holder can use: the rule of ``kvyard.blocks.agreement``, asked with an index's rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvyard.blocks.agreement import Agreement
from kvyard.blocks.spans import Spans
from kvyard.index.backend import Rows
from kvyard.index.catalog import GroupLayout


class Usable:
    """The rules of one layout, against an index of ``block_size``."""

    def __init__(self, layout: GroupLayout, block_size: int) -> None:
        self.layout = layout
        self.block_size = block_size
        self._agreement = Agreement(layout.specs, [spec.eagle for spec in layout.specs], layout.alignment)

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
        return self._agreement.longest(seen, limit, end)

    def limiting(self, seen: Sequence[Spans], limit: int) -> int:
        """Which group (by position in the layout) reaches least far by itself."""
        reach = [
            (spec.rule().match(seen[at], limit, self.layout.alignment, False).tokens, at)
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
