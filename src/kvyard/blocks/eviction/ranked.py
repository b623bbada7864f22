"""Eviction by a score that is constant while an extent is a candidate: a heap, first in first out among equals."""

import heapq
from collections.abc import Callable, Iterator, Mapping
from itertools import count

from kvyard.blocks.eviction.learning import LearningOrder, history_of
from kvyard.blocks.extent import Extent, UseHistory

_TICKETS = count(1)
"""Unique numbers of heap entries: an extent that moves to another heap leaves a void entry behind."""


class RankHeap:
    """Extents by (score, serial), later positions first among the parts of one extent.

    Removed extents stay in the heap as void entries until they reach the top or too many entries are void.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, int, int, Extent]] = []
        self._count = 0

    def add(self, extent: Extent, history: UseHistory) -> None:
        """Add ``extent`` as a candidate, by the score and serial of ``history``."""
        self._count += 1
        self._enter(extent, history)

    def drop(self, history: UseHistory) -> None:
        """Make the entry of an extent void."""
        self._count -= 1
        history.ticket = 0

    def divide(self, extent: Extent, front: Extent) -> None:
        """Add ``front``, which was split off the candidate ``extent``, right behind it."""
        self._enter(extent, history_of(extent))  # its start has moved
        self.add(front, history_of(front))

    def _enter(self, extent: Extent, history: UseHistory) -> None:
        entries = self._entries
        if len(entries) > 64 + 2 * self._count:
            self._entries = entries = [entry for entry in entries if _valid(entry)]
            heapq.heapify(entries)
        history.ticket = next(_TICKETS)
        heapq.heappush(entries, (history.score, history.serial, -extent.start, history.ticket, extent))

    def first(self) -> Extent | None:
        """Return the next extent to evict, if there is any."""
        entries = self._entries
        while entries:
            if _valid(entries[0]):
                return entries[0][4]
            heapq.heappop(entries)
        return None

    def __iter__(self) -> Iterator[Extent]:
        return (entry[4] for entry in sorted(filter(_valid, self._entries)))


def _valid(entry: tuple[float, int, int, int, Extent]) -> bool:
    history = entry[4].history
    return history is not None and history.ticket == entry[3]


class RankedOrder(LearningOrder):
    """Least score first; among equals, the earliest candidate. Subclasses define the score."""

    def __init__(self, now: Callable[[], int], options: Mapping[str, float] | None = None) -> None:
        super().__init__(now, options)
        self._heap = RankHeap()
        self._back = 0
        self._front = 0

    def score(self, extent: Extent, history: UseHistory) -> float:
        """Return the score of ``extent``, which becomes a candidate; by default the one recorded with its last use."""
        return history.score

    def push(self, extent: Extent) -> None:
        self._back += 1
        self._place(extent, self._back)

    def push_front(self, extent: Extent) -> None:
        self._front -= 1
        self._place(extent, self._front)

    def _place(self, extent: Extent, serial: int) -> None:
        history = history_of(extent)
        history.score = self.score(extent, history)
        history.serial = serial
        self._heap.add(extent, history)

    def remove(self, extent: Extent) -> None:
        self._heap.drop(history_of(extent))

    def insert_after(self, extent: Extent, front: Extent) -> None:
        self._heap.divide(extent, front)

    def head(self) -> Extent:
        extent = self._heap.first()
        if extent is None:
            raise IndexError("no extent is left to evict")
        return extent

    def __iter__(self) -> Iterator[Extent]:
        return iter(self._heap)
