"""Lanes: requests that wait, ordered so that coming, leaving and going next each take logarithmic time.

A queue has one lane, or one for each tenant where tenants are limited. A lane of fixed ranks is a heap. ``LineLane`` is for
ranks that weigh two figures of a request, such as service and time waited, by weights that change with what else waits: a
tournament tree whose nodes know for which ratios of the weights their winner stays the winner, so that a change of the weights
plays only those games again whose outcome it can change.
"""

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from math import inf, nextafter
from typing import NamedTuple

from kvyard.router.flow.request import FlowRequest

_SPARE = 64
"""Stale entries that a heap may have beyond as many as wait."""


class Scale(NamedTuple):
    """Weights of both figures, and the smallest of each that waits."""

    x: float = 0.0
    y: float = 0.0
    least_x: float = 0.0
    least_y: float = 0.0

    @property
    def ratio(self) -> float:
        """Return weight of ``y`` for a weight of 1 of ``x``."""
        return self.y / self.x if self.x else inf

    def value(self, x: float, y: float) -> float:
        """Return the weighted sum of two figures."""
        return self.x * (x - self.least_x) + self.y * (y - self.least_y)


class Lane:
    """Requests in the order of fixed ranks. Heads of lanes compare by rank, then by serial number."""

    def __init__(self, rank: Callable[[FlowRequest, int], float]) -> None:
        self._rank = rank
        self._heap: list[tuple[float, int]] = []
        """Entries of requests that are gone, or have another rank by now, are skipped."""
        self._ranks: dict[int, float] = {}
        """By serial number."""
        self._skipped: set[int] = set()

    def __len__(self) -> int:
        return len(self._ranks)

    def add(self, serial: int, request: FlowRequest, now: int) -> None:
        """Add a request, or rank it again."""
        self._ranks[serial] = rank = self._rank(request, now)
        heappush(self._heap, (rank, serial))

    def discard(self, serial: int) -> None:
        """Remove a request."""
        del self._ranks[serial]
        self._skipped.discard(serial)
        if len(self._heap) > 2 * len(self._ranks) + _SPARE:  # clients that come and go leave nothing behind
            self._heap = [(rank, serial) for serial, rank in self._ranks.items() if serial not in self._skipped]
            heapify(self._heap)

    def head(self, scale: Scale) -> tuple[float, int] | None:
        """Return the rank and serial number of the request that goes next, less those that are skipped."""
        heap, ranks = self._heap, self._ranks
        while heap and (ranks.get(heap[0][1]) != heap[0][0] or heap[0][1] in self._skipped):
            heappop(heap)
        return heap[0] if heap else None

    def skip(self, serial: int) -> None:
        """Pass over a request until it is restored."""
        self._skipped.add(serial)

    def restore(self, serial: int) -> None:
        """Let a skipped request be the head again, if it still waits."""
        if serial in self._skipped:
            self._skipped.discard(serial)
            heappush(self._heap, (self._ranks[serial], serial))


class FigureRange:
    """Smallest and largest figures of a node's requests."""

    __slots__ = ("most_x", "most_y", "x", "y")

    def __init__(self, x: float = inf, y: float = inf, most_x: float = -inf, most_y: float = -inf) -> None:
        self.x, self.y, self.most_x, self.most_y = x, y, most_x, most_y


_EMPTY = FigureRange()
_NOBODY = -1


class LineLane(Lane):
    """Requests in the order of weighted sums of two figures; the weights are given with each question."""

    def __init__(self, figures: Callable[[FlowRequest, int], tuple[float, float]]) -> None:
        """``figures`` of a request are asked when it comes, and when it is added again."""
        super().__init__(lambda request, now: 0.0)
        self._figures = figures
        self._slots: dict[int, int] = {}
        """By serial number, places in the lists below."""
        self._x: list[float] = []
        self._y: list[float] = []
        self._ratio = 0.0
        """Of the weights that were asked for last."""
        self._grow(8)

    def _grow(self, size: int) -> None:
        """Make the tree anew with ``size`` leaves, a power of two."""
        old = [(serial, self._x[slot], self._y[slot]) for serial, slot in self._slots.items()]
        self._size = size
        self._free = list(range(size - 1, -1, -1))
        self._x, self._y, self._serials = [0.0] * size, [0.0] * size, [_NOBODY] * size
        self._winner = [_NOBODY] * (2 * size)
        """By node (the root is 1, the leaves are the last ``size``), the slot that goes first of those below it,"""
        self._low, self._high = [0.0] * (2 * size), [inf] * (2 * size)
        """for ratios from this one to that one."""
        self._ranges = [_EMPTY] * (2 * size)
        for serial, x, y in old:
            self._fill(self._free.pop(), serial, x, y)
        for node in range(size - 1, 0, -1):
            self._play(node)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def range(self) -> FigureRange:
        """Smallest and largest figures of all, skipped ones included."""
        return self._ranges[1]

    def add(self, serial: int, request: FlowRequest, now: int) -> None:
        slot = self._slots.get(serial)
        if slot is None:
            if not self._free:
                self._grow(2 * self._size)
            slot = self._free.pop()
        self._fill(slot, serial, *self._figures(request, now))
        self._play_up(slot)

    def discard(self, serial: int) -> None:
        slot = self._slots.pop(serial)
        self._skipped.discard(serial)
        self._free.append(slot)
        leaf = self._size + slot
        self._winner[leaf], self._ranges[leaf] = _NOBODY, _EMPTY
        self._play_up(slot)

    def head(self, scale: Scale) -> tuple[float, int] | None:
        if not scale.x and not scale.y:  # all are equal
            return min(((0.0, serial) for serial in self._slots if serial not in self._skipped), default=None)
        self._ratio = scale.ratio
        self._renew(1)
        slot = self._winner[1]
        if slot == _NOBODY:
            return None
        return scale.value(self._x[slot], self._y[slot]), self._serials[slot]

    def skip(self, serial: int) -> None:
        self._skipped.add(serial)
        self._set_winner(serial, _NOBODY)

    def restore(self, serial: int) -> None:
        if serial in self._skipped:
            self._skipped.discard(serial)
            self._set_winner(serial, self._slots[serial])

    # -- the tree -------------------------------------------------------------------------------------------------------

    def _set_winner(self, serial: int, winner: int) -> None:
        slot = self._slots[serial]
        self._winner[self._size + slot] = winner
        self._play_up(slot)

    def _fill(self, slot: int, serial: int, x: float, y: float) -> None:
        self._slots[serial] = slot
        self._x[slot], self._y[slot], self._serials[slot] = x, y, serial
        leaf = self._size + slot
        self._ranges[leaf] = FigureRange(x, y, x, y)
        self._winner[leaf] = _NOBODY if serial in self._skipped else slot

    def _play_up(self, slot: int) -> None:
        """Play all games that ``slot`` takes part in."""
        node = (self._size + slot) // 2
        while node:
            self._play(node)
            node //= 2

    def _renew(self, node: int) -> None:
        """Play the games below and at ``node`` again whose outcome isn't known for the present ratio."""
        if not self._low[node] <= self._ratio <= self._high[node]:
            self._play(node)

    def _play(self, node: int) -> None:
        left, right = 2 * node, 2 * node + 1
        self._renew(left)
        self._renew(right)
        low, high = max(self._low[left], self._low[right]), min(self._high[left], self._high[right])
        one, other = self._winner[left], self._winner[right]
        if one < 0 or other < 0:
            self._winner[node] = max(one, other)
        else:
            x, y = self._x[one] - self._x[other], self._y[one] - self._y[other]
            ratio = self._ratio
            lead = x + ratio * y if ratio < inf else y
            first = lead < 0 or (lead == 0 and self._serials[one] < self._serials[other])
            self._winner[node] = one if first else other
            # The ratio at which both are equal, and from which on the other one goes first.
            turn = -x / y if y else inf if x else -1.0
            if turn == ratio:
                low = high = ratio
            elif turn > ratio:
                high = min(high, nextafter(turn, 0.0))
            elif turn >= 0:
                low = max(low, nextafter(turn, inf))
        self._low[node], self._high[node] = low, high
        a, b = self._ranges[left], self._ranges[right]
        if a is _EMPTY or b is _EMPTY:
            self._ranges[node] = b if a is _EMPTY else a
        else:
            self._ranges[node] = FigureRange(
                min(a.x, b.x), min(a.y, b.y), max(a.most_x, b.most_x), max(a.most_y, b.most_y)
            )


def joined_range(lanes: Iterable[Lane]) -> FigureRange:
    """Return the smallest and largest figures of all lanes."""
    ranges = [lane.range for lane in lanes if isinstance(lane, LineLane)] or [FigureRange(0.0, 0.0, 0.0, 0.0)]
    return FigureRange(
        min(range_.x for range_ in ranges),
        min(range_.y for range_ in ranges),
        max(range_.most_x for range_ in ranges),
        max(range_.most_y for range_ in ranges),
    )
