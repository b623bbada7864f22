"""TraceArrivals: the arrival time of each request of a trace, given the requests that have ended so far.

Open loop: a request comes at its recorded time, divided by the speed-up. Requests that wait for others (turns of a session, an
agent's sub-agents) come when those have ended, plus their think time. Closed loop (``concurrency``): recorded times are
ignored; that many sessions, or requests if there are no sessions, are in flight at any time, and the next one starts when
one is through. A client's ``Pacing`` adds what lies between the two, and more.

A trace of single requests is read as far as needed and no further, and so is one that gives session after session to a closed
loop. Any other with sessions is read whole: a turn may be due long before the file comes to it.
"""

from array import array
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import chain, count

from kvyard.errors import KvyardError
from kvyard.replay.clients.client import PLAIN, Pacing
from kvyard.replay.traces import TraceRequest
from kvyard.replay.traces.changes import spread
from kvyard.replay.traces.identity import cumulative


class Arrivals:
    """Requests as they become due. ``take`` hands them out, ``ended`` reports that a request has ended."""

    @property
    def exhausted(self) -> bool:
        """True if nothing will come any more."""
        raise NotImplementedError

    def peek(self) -> int | None:
        """Return the time of the next request; ``None`` if that depends on others that haven't ended, or nothing comes."""
        raise NotImplementedError

    def take(self, now: int) -> list[TraceRequest]:
        """Return the requests that come at or before ``now``, in order."""
        raise NotImplementedError

    def ended(self, request: TraceRequest, now: int) -> None:
        """Note that ``request`` ended: requests that wait for it may arrive."""
        raise NotImplementedError

    def observed(self, request: TraceRequest, instant: int) -> int:
        """Return the time at which the client sees what of ``request`` reaches it at ``instant``."""
        return instant

    def recorded(self, request: TraceRequest) -> int:
        """Return the arrival of ``request`` unless an earlier one delays it; -1 if it follows others, or a slot of the
        closed loop."""
        raise NotImplementedError

    def check_empty(self) -> None:
        """Raise ``KvyardError`` if requests still wait for others that never came."""
        raise NotImplementedError


class TraceArrivals(Arrivals):
    """Requests at recorded times, or in a closed loop of sessions."""

    def __init__(
        self,
        requests: Iterable[TraceRequest],
        *,
        speedup: float = 1.0,
        concurrency: int | None = None,
        jitter: int = 0,
        pacing: Pacing = PLAIN,
        start: int = 0,
    ) -> None:
        """``jitter`` spreads requests that were recorded together over that many nanoseconds of trace time. ``start`` is when
        the trace begins. Raises ``KvyardError`` for a speed-up or concurrency that makes no sense, and, once it is read that
        far, for a trace whose ids aren't cumulative.
        """
        if not speedup > 0:
            raise KvyardError(f"the speed-up must be above 0, got {speedup}")
        if concurrency is not None and concurrency < 1:
            raise KvyardError(f"concurrency must be at least 1, got {concurrency}")
        self._grouped = bool(getattr(requests, "grouped", False))
        self._rows: Iterator[TraceRequest] = cumulative(spread(requests, jitter) if jitter else requests)
        self._slots: dict[str, str] = {}
        """Owners of slots by request id, where the request alone doesn't say."""
        self._knows_waiters = False
        """True if a request was read that waits for others."""
        self._whole = False
        """True if everything has been read."""
        self._speedup = speedup
        self._pacing = pacing
        self._start = start
        self._in_flight = 0
        """In open loop, requests taken and not ended."""
        self._most = pacing.most if concurrency is None else None
        self._now = start
        """Time of the latest end of a request."""
        self._slots_opened = 0
        self._concurrency = concurrency or 0
        self._sent: dict[str, int] = {}
        """With ``Pacing.join``: when each session sent its latest request."""
        self._joined = 0
        """With ``Pacing.join``: sessions that have started."""
        self._free = concurrency
        """Slots left in closed loop, ``None`` in open loop."""
        self._heap: list[tuple[int, int, TraceRequest]] = []
        self._serial = count()
        self._row: TraceRequest | None = None
        self._exhausted = False
        self._tails: dict[str, str] = {}
        """The last request read of each session that isn't over."""
        self._waiting: dict[str, list[TraceRequest]] = {}
        """By the id of one who must end first."""
        self._missing: dict[str, int] = {}
        """Number of requests that must still end before a request can come."""
        self._ends: dict[str, int] = {}
        """Ends of requests that others may name."""
        self._early = bytearray()
        """Names of those that ended while no request that waits for others had been read: most traces have none at all, and
        then these take far less room than ``_ends`` would."""
        self._early_sizes = array("q")
        self._early_ends = array("q")
        self._open: dict[str, int] = {}
        """In closed loop: requests read and not ended, by the session that has the slot."""
        if pacing.join is not None:
            self._rows, self._whole = iter(list(self._rows)), True
        self._next_row()
        self._fill(start)

    @property
    def exhausted(self) -> bool:
        return self._exhausted and not (self._heap or self._waiting)

    def peek(self) -> int | None:
        if not self._heap:
            return None
        if self._most is None:
            return self._heap[0][0]
        return max(self._heap[0][0], self._now) if self._in_flight < self._most else None

    def take(self, now: int) -> list[TraceRequest]:
        out: list[TraceRequest] = []
        heap, most = self._heap, self._most
        while heap and heap[0][0] <= now and (most is None or self._in_flight < most):
            row = heappop(heap)[2]
            out.append(row)
            self._in_flight += 1
            if self._pacing.join is not None and row.session is not None:
                self._sent[row.session] = now
            self._fill(now)
        return out

    def ended(self, request: TraceRequest, now: int) -> None:
        self._in_flight -= 1
        self._now = now
        # Those that name it may not have been read yet.
        if self._knows_waiters:
            self._ends[request.id] = now
        elif not self._exhausted:
            name = request.id.encode("utf-8", "surrogatepass")
            self._early += name
            self._early_sizes.append(len(name))
            self._early_ends.append(now)
        for waiter in self._waiting.pop(request.id, ()):
            self._missing[waiter.id] -= 1
            if not self._missing[waiter.id]:
                del self._missing[waiter.id]
                self._push(waiter, self._due(waiter, now))
        if self._free is not None:
            self._free_slot(request, now)

    def recorded(self, request: TraceRequest) -> int:
        if request.delay is not None or self._free is not None or self._pacing.join is not None:
            return -1
        return self._start + self._scaled(request.arrival)

    def check_empty(self) -> None:
        for name, waiting in self._waiting.items():
            raise KvyardError(
                f"{len(self._missing)} requests wait for others that are not in the trace: "
                f"{waiting[0].id}, for one, waits for {name}"
            )

    # -- inside -----------------------------------------------------------------------------------------------------

    def _next_row(self) -> None:
        self._row = row = next(self._rows, None)
        if row is None:
            self._exhausted = True
        elif row.session is not None or row.after:
            if not self._knows_waiters:
                self._recall()
            if not self._whole and (self._free is None or not self._grouped):
                self._read_all(row)

    def _recall(self) -> None:
        """Keep the names of ended requests from the first request that waits for others on."""
        self._knows_waiters = True
        start = 0
        for size, end in zip(self._early_sizes, self._early_ends):
            self._ends[self._early[start : start + size].decode("utf-8", "surrogatepass")] = end
            start += size
        self._early, self._early_sizes, self._early_ends = bytearray(), array("q"), array("q")

    def _read_all(self, row: TraceRequest) -> None:
        """Read the rest, from ``row`` on. In closed loop, put together what shares a slot."""
        self._whole = True
        if self._free is None:
            self._rows = iter(list(self._rows))
            return
        rows = [row, *self._rows]
        self._slots = _joined(rows)
        together: dict[str, list[TraceRequest]] = {}
        for request in rows:
            together.setdefault(self._slot(request), []).append(request)
        self._rows = chain.from_iterable(together.values())
        self._row = next(self._rows)

    def _fill(self, now: int) -> None:
        """Read until the next request that waits for no other comes later than what is known to come."""
        while self._row is not None:
            row = self._row
            waits = self._predecessors(row)
            due = now
            if self._free is not None:
                key = self._slot(row)
                if key not in self._open:
                    if self._free < 1:
                        return
                    self._free -= 1
                    self._open[key] = 0
                    due += self._until_sent()
                self._open[key] += 1
            if waits:
                self._hold(row, waits, now)
            elif self._free is not None:
                self._push(row, due)
            else:
                due = self._start + self._first_due(row)
                if not self._whole and self._heap and self._heap[0][0] < due:
                    return
                self._push(row, due)
            if row.session is not None:
                self._tails[row.session] = row.id
            self._next_row()

    def _until_sent(self) -> int:
        """Return the wait of a slot that opens now before it sends: its share of the ramp, or the client's turn-around."""
        opened = self._slots_opened
        self._slots_opened += 1
        return (
            self._pacing.ramp * opened // self._concurrency if opened < self._concurrency else self._pacing.turnaround
        )

    def _first_due(self, row: TraceRequest) -> int:
        """Return the arrival of a request in open loop that waits for no other, counted from the start."""
        if self._pacing.join is None:
            return self._scaled(row.arrival)
        self._joined += 1
        return self._pacing.first(self._joined - 1)

    def _predecessors(self, row: TraceRequest) -> list[str]:
        waits = list(row.after)
        if row.session is not None and row.session in self._tails:
            waits.append(self._tails[row.session])
        return waits

    def _hold(self, row: TraceRequest, waits: list[str], now: int) -> None:
        """Keep ``row`` until those it waits for have ended; they may have already."""
        missing = [name for name in waits if name not in self._ends]
        if not missing:
            self._push(row, max(now, self._due(row, max(self._ends[name] for name in waits))))
            return
        self._missing[row.id] = len(missing)
        for name in missing:
            self._waiting.setdefault(name, []).append(row)

    def _due(self, row: TraceRequest, ended: int) -> int:
        if self._pacing.join is not None and row.session in self._sent:
            return self._pacing.next(self._sent[row.session], ended)
        if row.delay is not None:
            return ended + self._scaled(row.delay)
        if self._free is not None:
            return ended + self._pacing.turnaround
        return max(ended, self._start + self._scaled(row.arrival))

    def _push(self, row: TraceRequest, due: int) -> None:
        heappush(self._heap, (due, next(self._serial), row))

    def _free_slot(self, request: TraceRequest, now: int) -> None:
        key = self._slot(request)
        self._open[key] -= 1
        if not self._open[key]:
            # Of a session that isn't read to its end yet the next turn follows, and keeps the slot.
            if self._row is None or self._slot(self._row) != key:
                del self._open[key]
                assert self._free is not None
                self._free += 1
            self._fill(now)

    def _slot(self, request: TraceRequest) -> str:
        """Return the owner of a slot of the closed loop: a session with all its sub-agents, or a single request."""
        return self._slots.get(request.id) or request.root or request.session or request.id

    def _scaled(self, ns: int) -> int:
        return ns if self._speedup == 1.0 else round(ns / self._speedup)


def _joined(rows: list[TraceRequest]) -> dict[str, str]:
    """One slot for all that wait for each other, by request id: sessions joined by ``after`` are in flight together."""
    above: dict[str, str] = {}

    def top(name: str) -> str:
        while (up := above.setdefault(name, name)) != name:
            above[name] = name = above[up]
        return name

    keys = {row.id: row.root or row.session or row.id for row in rows}
    for row in rows:
        for name in row.after:
            if name in keys:
                above[top(keys[row.id])] = top(keys[name])
    return {row.id: top(keys[row.id]) for row in rows}
