"""Eviction orders: in which order cached extents that nobody holds are given up.

An order is a sequence of extents, next victim first. Inside an extent the last position goes first, since a chain is
worth less without its head than without its tail. ``ORDERS`` is the registry; ``lru`` is vLLM's, ``priority`` is
TensorRT-LLM's retention priority. An order only sees extents: what they contain is none of its business.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Protocol

from mypy_extensions import mypyc_attr

from kvyard.blocks.extent import DEFAULT_PRIORITY, Extent
from kvyard.blocks.spec import ConfigError


class EvictionOrder(Protocol):
    """What the pool asks of an order. All verbs but iteration take constant (or logarithmic) time."""

    reads_priorities: bool
    """Whether it goes by the retention priorities of extents, and by the time at which those expire."""

    def push(self, extent: Extent) -> None:
        """The last holder let go of ``extent``: it becomes a candidate, after its equals."""

    def push_front(self, extent: Extent) -> None:
        """``extent`` was taken from the head and comes back there: it is the next to go among its equals."""

    def remove(self, extent: Extent) -> None:
        """``extent`` was hit or is gone: it is no candidate any more."""

    def insert_after(self, extent: Extent, front: Extent) -> None:
        """``front`` was split off ``extent``, a candidate; it is the next to go after it."""

    def head(self) -> Extent:
        """The next victim. Raises ``IndexError`` when there is none."""

    def __iter__(self) -> Iterator[Extent]:
        """All candidates, next victim first."""


@mypyc_attr(allow_interpreted_subclasses=True)  # orders of one's own are made of it
class Line:
    """A doubly linked line of extents: the one building block of the orders below."""

    __slots__ = ("_first", "_last", "reads_priorities")

    def __init__(self) -> None:
        self.reads_priorities = False
        # Two sentinels, so that no verb has an edge case.
        self._first = Extent([], 0, 0)
        self._last = Extent([], 0, 0)
        self._first.after = self._last
        self._last.before = self._first

    def push(self, extent: Extent) -> None:
        last = self._last
        tail = last.before
        assert tail is not None
        tail.after = extent
        extent.before = tail
        extent.after = last
        last.before = extent

    def push_front(self, extent: Extent) -> None:
        self.insert_after(self._first, extent)

    def remove(self, extent: Extent) -> None:
        before, after = extent.before, extent.after
        assert before is not None
        assert after is not None
        before.after = after
        after.before = before
        extent.before = extent.after = None

    def insert_after(self, extent: Extent, front: Extent) -> None:
        after = extent.after
        assert after is not None
        extent.after = front
        front.before = extent
        front.after = after
        after.before = front

    def head(self) -> Extent:
        first = self._first.after
        assert first is not None
        if first is self._last:
            raise IndexError("no extent is left to evict")
        return first

    def empty(self) -> bool:
        return self._first.after is self._last

    def __iter__(self) -> Iterator[Extent]:
        at = self._first.after
        while at is not None and at is not self._last:
            yield at
            at = at.after


class PriorityOrder:
    """Lowest retention priority first, least recently used first among equals.

    A raised priority may expire: the clock starts when the extent becomes free, and on expiry it falls back to the default
    priority, behind those already there.
    """

    def __init__(self, now: Callable[[], int]) -> None:
        self.reads_priorities = True
        self._now = now
        self._lines: dict[int, Line] = {}
        self._deadlines: list[tuple[int, int, Extent]] = []
        self._serial = 0
        self._compact_at = 64

    def push(self, extent: Extent) -> None:
        self._expire()  # what expired before is ahead
        self._line(extent.priority).push(extent)
        if extent.expires is not None and extent.priority != DEFAULT_PRIORITY:
            self._arm(extent, self._now() + extent.expires)

    def push_front(self, extent: Extent) -> None:
        self._expire()
        self._line(extent.priority).push_front(extent)
        if extent.expires is not None and extent.priority != DEFAULT_PRIORITY:
            self._arm(extent, self._now() + extent.expires)

    def remove(self, extent: Extent) -> None:
        self._lines[extent.priority].remove(extent)
        extent.deadline = None

    def insert_after(self, extent: Extent, front: Extent) -> None:
        self._lines[extent.priority].insert_after(extent, front)
        if extent.deadline is not None:
            self._arm(front, extent.deadline)

    def head(self) -> Extent:
        self._expire()
        for priority in sorted(self._lines):
            line = self._lines[priority]
            if not line.empty():
                return line.head()
            del self._lines[priority]
        raise IndexError("no extent is left to evict")

    def __iter__(self) -> Iterator[Extent]:
        self._expire()
        for priority in sorted(self._lines):
            yield from self._lines[priority]

    def _line(self, priority: int) -> Line:
        line = self._lines.get(priority)
        if line is None:
            line = self._lines[priority] = Line()
        return line

    def _arm(self, extent: Extent, deadline: int) -> None:
        extent.deadline = deadline
        self._serial += 1
        if len(self._deadlines) >= self._compact_at:
            # Most belong to extents that were hit since: their deadlines are void.
            self._deadlines = list({e[2]: e for e in self._deadlines if e[2].deadline == e[0]}.values())
            heapq.heapify(self._deadlines)
            self._compact_at = max(64, 2 * len(self._deadlines))
        heapq.heappush(self._deadlines, (deadline, self._serial, extent))

    def _expire(self) -> None:
        now = self._now()
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, _, extent = heapq.heappop(self._deadlines)
            if extent.deadline == deadline:  # else it was hit or evicted since, and may have been freed again
                self.remove(extent)
                extent.priority, extent.expires = DEFAULT_PRIORITY, None
                self._line(DEFAULT_PRIORITY).push(extent)


ORDERS: dict[str, Callable[[Callable[[], int]], EvictionOrder]] = {
    "lru": lambda now: Line(),
    "priority": PriorityOrder,
}
"""Eviction orders by name. An entry takes a function that tells the time (nanoseconds) and makes an empty order."""


def make_order(name: str, now: Callable[[], int]) -> EvictionOrder:
    """The order called ``name``. Raises ``ConfigError`` for a name nobody registered."""
    maker = ORDERS.get(name)
    if maker is None:
        raise ConfigError(f"unknown eviction order {name!r}; choose one of {', '.join(sorted(ORDERS))}")
    return maker(now)
