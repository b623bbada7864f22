"""A segment: consecutive blocks of one chain, with runs of equal rows stored once.

Keys are packed, rows are run-length encoded: a run is where it ends and one integer. A stretch whose row is 0 is *dead*: no
place holds it, its keys may live in another segment by now, and it is only kept because something around it lives.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import TypeAlias

Piece: TypeAlias = tuple[int, int, int]
"""Offsets from and to, and the row that was there."""


class Segment:
    """Up to a few thousand blocks. Offsets count from its first block."""

    __slots__ = ("base", "keys", "masks", "stops", "touched")

    def __init__(self, base: int) -> None:
        self.base = base
        """What to add to an offset to get the location that the index keeps for a key."""
        self.keys = array("Q")
        self.stops: list[int] = []
        self.masks: list[int] = []
        self.touched = False
        """Whether it was of use since eviction last looked at it."""

    def extend(self, keys: array[int], mask: int) -> None:
        """Add ``keys`` at the end, all with the row ``mask``."""
        self.keys.extend(keys)
        if self.masks and self.masks[-1] == mask:
            self.stops[-1] = len(self.keys)
        else:
            self.stops.append(len(self.keys))
            self.masks.append(mask)

    def agree(self, off: int, keys: Sequence[int], at: int) -> int:
        """How many keys from ``off`` on are those of the chain ``keys`` from ``at`` on; at least the first one is.

        Chained keys: equal at a position means equal before it, so this is a handful of comparisons.
        """
        mine = self.keys
        high = min(len(mine) - off, len(keys) - at)
        if mine[off + high - 1] == keys[at + high - 1]:
            return high
        return agreeing(mine, off, keys, at, high)

    def span(self, off: int, keys: Sequence[int], at: int) -> tuple[int, int]:
        """How many of ``keys`` from ``at`` on lie here from ``off`` on, in order, and the step: 1 forwards, -1 backwards.

        These keys are any list, so each is compared; built-in comparison does most of it.
        """
        mine, most = self.keys, len(keys) - at
        if most > 1:
            if off + 1 < len(mine) and mine[off + 1] == keys[at + 1]:
                count = min(most, len(mine) - off)
                return _common(mine[off : off + count].tolist(), keys[at : at + count]), 1
            if off and mine[off - 1] == keys[at + 1]:
                count = min(most, off + 1)
                return _common(mine[off - count + 1 : off + 1].tolist()[::-1], keys[at : at + count]), -1
        return 1, 1

    def live(self, off: int) -> tuple[int, int]:
        """Where the run at ``off`` ends, and its row."""
        run = bisect_right(self.stops, off)
        return self.stops[run], self.masks[run]

    def paint(self, low: int, high: int, add: int, drop: int) -> list[Piece]:
        """Set the bits ``add`` and unset the bits ``drop`` from ``low`` to ``high``; returns what was there before."""
        stops, masks = self.stops, self.masks
        first = run = bisect_right(stops, low)
        start = stops[run - 1] if run else 0
        keep = ~drop
        if high <= stops[run]:
            # Inside one run, and going on where a neighbour ends: a replica that fills up, an eviction from the tail.
            old = masks[run]
            new = (old | add) & keep
            if new == old:
                return [(low, high, old)]
            if start == low and high < stops[run] and run and masks[run - 1] == new:
                stops[run - 1] = high
                return [(low, high, old)]
            if start < low and high == stops[run] and run + 1 < len(masks) and masks[run + 1] == new:
                stops[run] = low
                return [(low, high, old)]
        before: list[Piece] = []
        new_stops: list[int] = []
        new_masks: list[int] = []
        if start < low:
            new_stops.append(low)
            new_masks.append(masks[run])
        at = low
        while at < high:
            old, stop = masks[run], stops[run]
            end = stop if stop < high else high
            before.append((at, end, old))
            new = (old | add) & keep
            if new_masks and new_masks[-1] == new:
                new_stops[-1] = end
            else:
                new_stops.append(end)
                new_masks.append(new)
            at = end
            if end == stop:
                run += 1
            elif new_masks[-1] == old:
                new_stops[-1] = stop
                run += 1
            else:
                new_stops.append(stop)
                new_masks.append(old)
                run += 1
        if first and masks[first - 1] == new_masks[0]:
            first -= 1
        if run < len(masks) and masks[run] == new_masks[-1]:
            new_stops[-1] = stops[run]
            run += 1
        stops[first:run] = new_stops
        masks[first:run] = new_masks
        return before

    def trim(self) -> None:
        """Let go of a dead end."""
        if self.masks and not self.masks[-1]:
            self.masks.pop()
            self.stops.pop()
            del self.keys[self.stops[-1] if self.stops else 0 :]


def agreeing(mine: Sequence[int], off: int, keys: Sequence[int], at: int, high: int) -> int:
    """How many of ``high`` keys are equal, of two chains that agree on the first and not on the last."""
    low = 1
    high -= 1
    while low < high:
        middle = (low + high + 1) >> 1
        if mine[off + middle - 1] == keys[at + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _common(mine: list[int], theirs: Sequence[int]) -> int:
    """How many of the first elements are equal."""
    if mine == theirs:
        return len(mine)
    return next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), len(mine))
