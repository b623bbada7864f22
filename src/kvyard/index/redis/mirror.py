"""The mirror: what this process itself knows of the streams it follows, so that the server never has to be asked for it.

A writer is the only one who writes for its owners, so its own memory answers exactly whether a block was held, without a round
trip. And it is what a server that lost its data is filled from again, at once and whatever the engines can still tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvyard.index.memory import MemoryIndex
from kvyard.index.segment import Segment


class Mirror(MemoryIndex):
    """An index in memory that says what it forgets."""

    def __init__(self, budget: int | None, forgotten: Callable[[int, Sequence[int]], None]) -> None:
        """``forgotten`` is told the place and the keys whenever the budget makes it let go of something."""
        super().__init__(budget=budget)
        self._forgotten = forgotten

    def holding(self) -> list[int]:
        """The places that hold something."""
        return [place for place, numbers in enumerate(self._held) if numbers]

    def _forget(self, number: int, segment: Segment) -> None:
        start = 0
        for stop, mask in zip(segment.stops, segment.masks, strict=True):
            keys = segment.keys[start:stop].tolist()
            for place, numbers in enumerate(self._held):
                if mask >> place & 1 and number in numbers:
                    self._forgotten(place, keys)
            start = stop
        super()._forget(number, segment)
