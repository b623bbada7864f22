"""A segment: consecutive blocks of one chain, with runs of equal rows stored once.

Keys are packed, rows are run-length encoded: a run is where it ends and one integer. A stretch whose row is 0 is *dead*: no
place holds it, its keys may live in another segment by now, and it is only kept because something around it lives.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from kvyard.hashing.stretches import paint, parting, repaint

Painted: TypeAlias = tuple[int, int, int]
"""Offsets from and to, and the row that was there."""


class Segment:
    """Up to a few thousand blocks. Offsets count from its first block."""

    __slots__ = ("base", "fork", "keys", "masks", "stops", "touched")

    def __init__(self, base: int) -> None:
        self.base = base
        """What to add to an offset to get the location that the index keeps for a key."""
        self.keys = array("Q")
        self.stops: list[int] = []
        self.masks: list[int] = []
        self.fork = 0
        """Where another chain was last found to leave this one; only ever a guess."""
        self.touched = False
        """Whether it was of use since eviction last looked at it."""

    def grow(self, stop: int, mask: int) -> None:
        """Give the row ``mask`` to what was added to ``keys``, up to ``stop``."""
        masks = self.masks
        if masks and masks[-1] == mask:
            self.stops[-1] = stop
        else:
            self.stops.append(stop)
            masks.append(mask)

    def agree(self, off: int, keys: Sequence[int], at: int) -> int:
        """How many keys from ``off`` on are those of the chain ``keys`` from ``at`` on; at least the first one is.

        Chained keys: equal at a position means equal before it, so this is a handful of comparisons.
        """
        mine = self.keys
        high = min(len(mine) - off, len(keys) - at)
        if mine[off + high - 1] == keys[at + high - 1]:
            return high
        return self.part(off, keys, at, off + high) - off

    def part(self, off: int, keys: Sequence[int], at: int, stop: int) -> int:
        """Where the chain ``keys`` leaves this one, with which it agrees at ``off`` and no longer just before ``stop``.

        Texts often part where others did before (a common template, a conversation begun again), so that is tried first.
        """
        mine, shift = self.keys, at - off
        same, other = off, stop - 1
        fork = self.fork
        if same < fork <= other:
            if mine[fork - 1] != keys[fork - 1 + shift]:
                other = fork - 1
            elif mine[fork] != keys[fork + shift]:
                return fork
            else:
                same = fork
        self.fork = parting(mine, keys, same, other, 0, -shift)
        return self.fork

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

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Every run: from and to where, and its row."""
        return zip([0, *self.stops], self.stops, self.masks, strict=False)

    def live(self, off: int) -> tuple[int, int]:
        """Where the run at ``off`` ends, and its row."""
        run = bisect_right(self.stops, off)
        return self.stops[run], self.masks[run]

    def join(self, off: int, keys: Sequence[int], bit: int) -> bool:
        """Set ``bit`` for all of the chain ``keys``, whose first is at ``off``, where they lie in one living run without it.

        The common case of a store, in one step; says whether it was that.
        """
        mine = self.keys
        end = off + len(keys)
        if end > len(mine) or mine[end - 1] != keys[-1]:
            return False
        run = bisect_right(self.stops, off)
        old = self.masks[run]
        if not old or old & bit or end > self.stops[run]:
            return False
        repaint(self.stops, self.masks, 0, run, off, end, old | bit)
        return True

    def leave(self, low: int, high: int, bit: int) -> int:
        """Unset ``bit`` from ``low`` to ``high`` where that lies in one run that has it: the common case of a removal.

        Returns the row that was there, 0 where nothing was changed because it isn't so.
        """
        run = bisect_right(self.stops, low)
        old = self.masks[run]
        if not old & bit or high > self.stops[run]:
            return 0
        repaint(self.stops, self.masks, 0, run, low, high, old ^ bit)
        return old

    def paint(self, low: int, high: int, add: int, drop: int) -> list[Painted]:
        """Set the bits ``add`` and unset the bits ``drop`` from ``low`` to ``high``; returns what was there before."""
        return paint(self.stops, self.masks, 0, low, high, add, drop)

    def trim(self) -> None:
        """Let go of a dead end."""
        if self.masks and not self.masks[-1]:
            self.masks.pop()
            self.stops.pop()
            del self.keys[self.stops[-1] if self.stops else 0 :]


def _common(mine: list[int], theirs: Sequence[int]) -> int:
    """How many of the first elements are equal."""
    if mine == theirs:
        return len(mine)
    return next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), len(mine))
