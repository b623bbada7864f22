"""ProcessArrivals: a closed loop whose slots belong to the processes of a load generator, with sessions that stay with one.

inference-perf sends sessions this way: the first turns of all sessions, then the second ones, and so on, each in the queue of
the session's process. A slot takes the next turn of its queue, waits until the turn before it has been answered, and is held
for the pause after the answer, too. So one session that waits long keeps several slots from other sessions.

A process is one event loop. While it tokenizes a turn, before sending it and after its answer, it sees no token of another.
"""

from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush

from kvyard.replay.arrivals import Arrivals
from kvyard.replay.clients.client import Pacing
from kvyard.replay.traces import TraceRequest
from kvyard.replay.traces.identity import cumulative

COUNTED = 2
"""Times that a turn is tokenized once it is answered."""


class ProcessArrivals(Arrivals):
    """Turns of sessions as processes with slots of their own send them. Recorded times and think times are ignored."""

    def __init__(self, requests: Iterable[TraceRequest], *, concurrency: int, pacing: Pacing, start: int = 0) -> None:
        """``concurrency`` slots are shared out evenly among ``pacing.processes``; the pause is its turn-around."""
        self._pause = pacing.turnaround
        self._token_ns = pacing.token_ns
        processes = min(pacing.processes, concurrency)
        self._loops = [EventLoop() for _ in range(processes)]
        self._free = [concurrency // processes + (number < concurrency % processes) for number in range(processes)]
        """Slots left, by process."""
        self._queues: list[deque[TraceRequest]] = [deque() for _ in range(processes)]
        self._process: dict[str, int] = {}
        """Process of a session."""
        self._busy: set[str] = set()
        """Sessions with a turn that is sent and not answered, or that pause."""
        self._held: dict[str, deque[TraceRequest]] = {}
        """Turns that have a slot and wait for their session."""
        self._heap: list[tuple[int, int, TraceRequest]] = []
        self._serial = 0
        turns: dict[str, int] = {}
        rounds: list[list[TraceRequest]] = []
        for row in cumulative(requests):
            session = _session(row)
            turn = turns[session] = turns.get(session, -1) + 1
            self._process.setdefault(session, len(self._process) % processes)
            if turn == len(rounds):
                rounds.append([])
            rounds[turn].append(row)
        for rows in rounds:
            for row in rows:
                self._queues[self._process[_session(row)]].append(row)
        for process in range(processes):
            self._fill(process, start)

    @property
    def exhausted(self) -> bool:
        return not (self._heap or self._held or any(self._queues))

    def peek(self) -> int | None:
        return self._heap[0][0] if self._heap else None

    def take(self, now: int) -> list[TraceRequest]:
        out: list[TraceRequest] = []
        while self._heap and self._heap[0][0] <= now:
            out.append(heappop(self._heap)[2])
        return out

    def observed(self, request: TraceRequest, instant: int) -> int:
        return self._loops[self._process[_session(request)]].free_from(instant)

    def ended(self, request: TraceRequest, now: int) -> None:
        session = _session(request)
        process = self._process[session]
        counted = self._loops[process].run(now, round(COUNTED * self._token_ns * request.input_length))
        released = counted + self._pause
        held = self._held.get(session)
        if held:
            self._push(held.popleft(), released)
            if not held:
                del self._held[session]
        else:
            self._busy.discard(session)
        self._free[process] += 1
        self._fill(process, released)

    def recorded(self, request: TraceRequest) -> int:
        return -1

    def check_empty(self) -> None:
        """Check nothing: no request can wait for one that isn't in the trace."""

    def _fill(self, process: int, now: int) -> None:
        """Give the free slots of ``process`` the next turns of its queue."""
        queue = self._queues[process]
        while queue and self._free[process]:
            self._free[process] -= 1
            row = queue.popleft()
            session = _session(row)
            if session in self._busy:
                self._held.setdefault(session, deque()).append(row)
            else:
                self._busy.add(session)
                self._push(row, now)

    def _push(self, row: TraceRequest, due: int) -> None:
        """Send ``row`` when its process has tokenized it, from ``due`` on."""
        loop = self._loops[self._process[_session(row)]]
        heappush(self._heap, (loop.run(due, round(self._token_ns * row.input_length)), self._serial, row))
        self._serial += 1


class EventLoop:
    """The one thing that a process does at a time."""

    def __init__(self) -> None:
        self._spans: deque[tuple[int, int]] = deque()
        """Begin and end of what keeps it busy, in order, apart from each other; the latest ones."""

    def run(self, due: int, takes: int) -> int:
        """Reserve ``takes`` as soon as possible from ``due`` on; returns the end."""
        if takes == 0:
            return due
        spans = self._spans
        begins = self.free_from(due)
        # Behind everything that is planned already and would overlap it.
        for begin, end in spans:
            if begin < begins + takes and end > begins:
                begins = end
        place = len(spans)
        while place and spans[place - 1][0] > begins:
            place -= 1
        spans.insert(place, (begins, begins + takes))
        if len(spans) > KEPT:
            spans.popleft()
        return begins + takes

    def free_from(self, instant: int) -> int:
        """Return the first time from ``instant`` on at which nothing keeps it busy."""
        for begin, end in self._spans:
            if begin <= instant < end:
                instant = end
        return instant


KEPT = 256
"""Spans that a loop remembers: those of answers that are still streamed."""


def _session(row: TraceRequest) -> str:
    """Return the session of a row; a request without one is its own."""
    return row.session or row.id
