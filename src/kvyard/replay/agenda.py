"""The agenda: what happens next in a replay, and in which order at one instant. The order is decided here and nowhere else.

At one instant, in this order: passes end, worker by worker, and their events become visible; transfers between tiers land;
prompts are handed over from worker to worker; workers start, drain and fail as planned; requests that lost their worker, or had
none, are routed, then arriving requests, by all that is visible by now; the autoscaler decides; passes start, in the order of
the workers' numbers; and a sample is taken.

The agenda knows times and numbers. The loop carries entries out; whoever put an entry moves or removes it with ``put``.
"""

from heapq import heappop, heappush
from typing import Final

PASS_END: Final = 0
LANDING: Final = 1
HANDOVER: Final = 2
WORKER_CHANGE: Final = 3
REROUTING: Final = 4
ARRIVAL: Final = 5
SCALING: Final = 6
PASS_START: Final = 7
SAMPLE: Final = 8

NETWORK: Final = 0
"""Kind of HANDOVER: something arrives over the network,"""
COMPUTED: Final = 1
"""or prompts were computed just now."""

HELD_BACK: Final = 1
"""Kind of REROUTING: requests that flow control holds back, now that a worker has room; 0 is those without a worker."""
OVERDUE: Final = 2
"""Requests that waited long enough for a worker of their own."""

_KINDS: Final = 9
_BITS: Final = 32
_NUMBER: Final = (1 << _BITS) - 1
_NEVER: Final = -1


class Agenda:
    """A heap of (time, what, which). There is one entry at most for each (what, which); what was put off is skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        """With (what, which) in one number, so that they are compared in one go."""
        self._when: list[list[int]] = [[] for _ in range(_KINDS)]
        """By what and which, which are small numbers: lists are quicker here than a dict."""
        self._count = [0] * _KINDS
        """By what, how many are to come."""

    def put(self, when: int | None, what: int, which: int = 0) -> None:
        """Schedule ``what`` of ``which`` at ``when`` in place of its earlier time; ``None`` removes it."""
        times = self._when[what]
        while len(times) <= which:
            times.append(_NEVER)
        before = times[which]
        if when is None:
            if before != _NEVER:
                times[which] = _NEVER
                self._count[what] -= 1
        elif before != when:
            if before == _NEVER:
                self._count[what] += 1
            times[which] = when
            heappush(self._heap, (when, what << _BITS | which))

    def pop(self) -> tuple[int, int, int] | None:
        """Take the next: (when, what, which). ``None`` if nothing is left."""
        heap = self._heap
        while heap:
            when, key = heappop(heap)
            what, which = key >> _BITS, key & _NUMBER
            times = self._when[what]
            if times[which] == when:
                times[which] = _NEVER
                self._count[what] -= 1
                return when, what, which
        return None

    def has_before(self, when: int, what: int) -> bool:
        """True if anything comes before ``what`` at ``when``."""
        heap = self._heap
        while heap:
            first, key = heap[0]
            if self._when[key >> _BITS][key & _NUMBER] == first:
                return first < when or (first == when and key < what << _BITS)
            heappop(heap)
        return False

    def holds_beyond(self, *what: int) -> bool:
        """True if anything is to come but ``what``."""
        for kind in range(_KINDS):
            if self._count[kind] and kind not in what:
                return True
        return False
