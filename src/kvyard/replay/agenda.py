"""The agenda: what happens next in a replay, and in which order at one instant. The order is decided here and nowhere else.

At one instant passes end, worker by worker, and with them their events come out; what moves between tiers lands; workers start,
drain and fail as planned; requests that lost their worker, or had none, are routed, and then those that arrive, by all that is
visible by now; passes start, in the order of the workers' numbers; and when all is done a sample is taken.

The agenda knows times and numbers. What is done is the fleet's business, and whether it is still to be done is up to ``put``.
"""

from heapq import heappop, heappush

PASS_END = 0
LANDING = 1
WORKER_LIFE = 2
REROUTING = 3
ARRIVAL = 4
PASS_START = 5
SAMPLE = 6

_BITS = 32
_NUMBER = (1 << _BITS) - 1


class Agenda:
    """A heap of (time, what, which). There is one entry at most for each (what, which); what was put off is skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._when: dict[int, int] = {}
        """By (what, which) in one number, so that they are compared in one go."""

    def put(self, when: int | None, what: int, which: int = 0) -> None:
        """``what`` of ``which`` happens at ``when``, and not when it was put before; ``None``: not at all."""
        key = what << _BITS | which
        if when is None:
            self._when.pop(key, None)
        elif self._when.get(key) != when:
            self._when[key] = when
            heappush(self._heap, (when, key))

    def pop(self) -> tuple[int, int, int] | None:
        """Take the next: (when, what, which). ``None`` where nothing is left."""
        heap, times = self._heap, self._when
        while heap:
            when, key = heappop(heap)
            if times.get(key) == when:
                del times[key]
                return when, key >> _BITS, key & _NUMBER
        return None

    def has_before(self, when: int, what: int) -> bool:
        """Whether anything comes before ``what`` at ``when``."""
        heap, times = self._heap, self._when
        while heap and times.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return bool(heap) and heap[0] < (when, what << _BITS)

    def holds_beyond(self, *what: int) -> bool:
        """Whether anything is to come but ``what``."""
        return any(key >> _BITS not in what for key in self._when)
