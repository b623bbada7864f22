"""The order of TensorRT-LLM: by retention priority, then by age. With hints, before and behind those of its scale."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator

from kvyard.blocks.eviction.lru import LruOrder
from kvyard.blocks.extent import DEFAULT_PRIORITY, KEPT_THEN_FIRST, OVER, Extent


class PriorityOrder:
    """Lowest retention priority first, least recently used first among equals.

    A raised priority may expire: the clock starts when the extent becomes free, and on expiry it falls back to the default
    priority, behind those already there; or to the first to go, where the session that is kept for is not expected after that.
    """

    def __init__(self, now: Callable[[], int]) -> None:
        self.reads_priorities = True
        self._now = now
        self._lines: defaultdict[int, LruOrder] = defaultdict(LruOrder)
        self._deadlines: list[tuple[int, int, int, Extent]] = []
        """When, and among equals in which order: by who became free first, and of one that was split by who stands first."""
        self._serials: dict[Extent, int] = {}
        self._serial = 0
        self._compact_at = 64

    def push(self, extent: Extent) -> None:
        self._line_for(extent).push(extent)

    def push_front(self, extent: Extent) -> None:
        self._line_for(extent).push_front(extent)

    def _line_for(self, extent: Extent) -> LruOrder:
        """The line that ``extent``, now free, goes to; from now on its priority may expire."""
        self.expire()  # what expired before is ahead
        if extent.expires is not None and extent.priority != DEFAULT_PRIORITY:
            self._serial += 1
            self._arm(extent, self._now() + extent.expires, self._serial)
        return self._lines[extent.priority]

    def remove(self, extent: Extent) -> None:
        self.expire()  # what has expired by now is hit as an ordinary one
        self._lines[extent.priority].remove(extent)
        if extent.deadline is not None:
            self._disarm(extent)

    def insert_after(self, extent: Extent, front: Extent) -> None:
        self._lines[extent.priority].insert_after(extent, front)
        if extent.deadline is not None:
            self._arm(front, extent.deadline, self._serials[extent])

    def head(self) -> Extent:
        self.expire()
        for priority in sorted(self._lines):
            line = self._lines[priority]
            if not line.empty():
                return line.head()
            del self._lines[priority]
        raise IndexError("no extent is left to evict")

    def __iter__(self) -> Iterator[Extent]:
        self.expire()
        for priority in sorted(self._lines):
            yield from self._lines[priority]

    def _disarm(self, extent: Extent) -> None:
        extent.deadline = None
        del self._serials[extent]

    def _arm(self, extent: Extent, deadline: int, serial: int) -> None:
        extent.deadline = deadline
        self._serials[extent] = serial
        if len(self._deadlines) >= self._compact_at:
            # Most belong to extents that were hit since: their deadlines are void.
            self._deadlines = list({e[3]: e for e in self._deadlines if e[3].deadline == e[0]}.values())
            heapq.heapify(self._deadlines)
            self._compact_at = max(64, 2 * len(self._deadlines))
        heapq.heappush(self._deadlines, (deadline, serial, -extent.stop, extent))

    def expire(self) -> None:
        now = self._now()
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, _, _, extent = heapq.heappop(self._deadlines)
            if extent.deadline == deadline:  # else it was hit or evicted since, and may have been freed again
                self._lines[extent.priority].remove(extent)
                self._disarm(extent)
                extent.priority = OVER if extent.priority == KEPT_THEN_FIRST else DEFAULT_PRIORITY
                extent.expires = None
                self._lines[extent.priority].push(extent)
