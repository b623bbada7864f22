"""The order of TensorRT-LLM: by retention priority, then by age. With hints, before and behind those of its scale."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

from kvyard.blocks.eviction.lru import LruOrder
from kvyard.blocks.eviction.ranked import RankHeap
from kvyard.blocks.extent import DEFAULT_PRIORITY, KEPT_THEN_FIRST, OVER, Extent, UseHistory
from kvyard.registry import Option, Options


class _Line:
    """Extents of one priority: those that became free with it, and those that fell back to it since."""

    def __init__(self) -> None:
        self.released = LruOrder()
        self.expired = RankHeap()


class PriorityOrder:
    """Lowest retention priority first, least recently used first among equals.

    A raised priority may expire: the clock starts when the extent becomes free, and on expiry it falls back to the default
    priority, or to the first to go where the session that it is kept for is not expected after that. There it ranks by its
    last use, as in vLLM's pull request 38514, SGLang's ``retention_seconds`` and LMCache; TensorRT-LLM makes it the newest.
    """

    OPTIONS: ClassVar[Options] = {
        "expired_as_newest": Option(
            0, "1: a priority that expires makes a block the newest, as in TensorRT-LLM.", most=1
        ),
    }

    def __init__(self, now: Callable[[], int], options: Mapping[str, float] | None = None) -> None:
        self.reads_priorities = True
        self._now = now
        self._as_newest = bool(options and options["expired_as_newest"])
        self._lines: defaultdict[int, _Line] = defaultdict(_Line)
        self._deadlines: list[tuple[int, int, int, Extent]] = []
        """Expiry times, and an order among equals: by the time of becoming free, and within a split extent by position."""
        self._serials: dict[Extent, int] = {}
        """Rank of each candidate by its last use; parts of a split share one."""
        self._back = 0
        self._front = 0
        self._compact_at = 64

    def push(self, extent: Extent) -> None:
        self.expire()
        self._back += 1
        self._serials[extent] = self._back
        self._lines[extent.priority].released.push(extent)
        self._start_clock(extent)

    def push_front(self, extent: Extent) -> None:
        self.expire()
        self._front -= 1
        self._serials[extent] = self._front
        self._lines[extent.priority].released.push_front(extent)
        self._start_clock(extent)

    def _start_clock(self, extent: Extent) -> None:
        """``extent`` is free: from now on its priority may expire."""
        if extent.expires is not None and extent.priority != DEFAULT_PRIORITY:
            self._arm(extent, self._now() + extent.expires)

    def remove(self, extent: Extent) -> None:
        self.expire()  # what has expired by now is hit as an ordinary one
        line = self._lines[extent.priority]
        if extent.history is not None:
            line.expired.drop(extent.history)
            extent.history = None
        else:
            line.released.remove(extent)
        extent.deadline = None
        del self._serials[extent]

    def insert_after(self, extent: Extent, front: Extent) -> None:
        line = self._lines[extent.priority]
        self._serials[front] = self._serials[extent]
        if extent.history is not None:
            line.expired.divide(extent, front)
        else:
            line.released.insert_after(extent, front)
        if extent.deadline is not None:
            self._arm(front, extent.deadline)

    def head(self) -> Extent:
        self.expire()
        for priority in sorted(self._lines):
            line = self._lines[priority]
            expired = line.expired.first()
            if not line.released.empty():
                released = line.released.head()
                if expired is None or self._serials[released] < self._serials[expired]:
                    return released
            if expired is not None:
                return expired
            del self._lines[priority]
        raise IndexError("no extent is left to evict")

    def __iter__(self) -> Iterator[Extent]:
        self.expire()
        for priority in sorted(self._lines):
            line = self._lines[priority]
            yield from heapq.merge(line.released, line.expired, key=self._serials.__getitem__)

    def _arm(self, extent: Extent, deadline: int) -> None:
        extent.deadline = deadline
        if len(self._deadlines) >= self._compact_at:
            # Most belong to extents that were hit since: their deadlines are void.
            self._deadlines = list({e[3]: e for e in self._deadlines if e[3].deadline == e[0]}.values())
            heapq.heapify(self._deadlines)
            self._compact_at = max(64, 2 * len(self._deadlines))
        heapq.heappush(self._deadlines, (deadline, self._serials[extent], -extent.stop, extent))

    def expire(self) -> None:
        now = self._now()
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, _, _, extent = heapq.heappop(self._deadlines)
            if extent.deadline == deadline:  # else it was hit or evicted since, and may have been freed again
                self._lines[extent.priority].released.remove(extent)
                extent.deadline = extent.expires = None
                extent.priority = OVER if extent.priority == KEPT_THEN_FIRST else DEFAULT_PRIORITY
                self._fall_back(extent, self._lines[extent.priority])

    def _fall_back(self, extent: Extent, line: _Line) -> None:
        if self._as_newest:
            self._back += 1
            self._serials[extent] = self._back
            line.released.push(extent)
        else:
            extent.history = UseHistory()
            extent.history.serial = self._serials[extent]
            line.expired.add(extent, extent.history)
