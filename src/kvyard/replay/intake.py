"""The intake: takes requests from the trace as they come, has them placed, and closes their records when they are through."""

from collections.abc import Callable

from kvyard.engine.job import Job
from kvyard.replay.agenda import ARRIVAL, HELD_BACK, OVERDUE, REROUTING, Agenda
from kvyard.replay.arrivals import TraceArrivals
from kvyard.replay.flow import FleetFlow
from kvyard.replay.index_sync import IndexSync
from kvyard.replay.listeners import Listener
from kvyard.replay.placement import Placement
from kvyard.replay.record import Record
from kvyard.replay.records import Records
from kvyard.replay.scaling.autoscaler import Autoscaler
from kvyard.replay.warm_up import NO_WARM_UP, WarmUp


class Intake(Listener):
    """Intake of one run."""

    def __init__(
        self,
        agenda: Agenda,
        arrivals: TraceArrivals,
        records: Records,
        unplaced: list[Record],
        placement: Placement,
        index_sync: IndexSync,
        autoscaler: Autoscaler | None,
        warm_up: WarmUp = NO_WARM_UP,
        begin_window: Callable[[int], None] | None = None,
        front_end: Callable[[int], int] | None = None,
        flow: FleetFlow | None = None,
    ) -> None:
        """``unplaced`` are requests that came when no worker took any, or have lost theirs. ``begin_window`` is called before
        the first request that isn't for ``warm_up`` any more. ``front_end`` gives the nanoseconds that a prompt's tokens take
        outside of the engine, which clients wait for. ``flow`` holds requests back while workers have enough.
        """
        self.records = records
        self._agenda = agenda
        self._arrivals = arrivals
        self._unplaced = unplaced
        self._placement = placement
        self._index_sync = index_sync
        self._autoscaler = autoscaler
        self._warm_up = warm_up
        self._begin_window = begin_window
        self._front_end = front_end
        self._flow = flow
        self._first = -1
        """Time of the first request."""
        agenda.put(arrivals.peek(), ARRIVAL)

    @property
    def exhausted(self) -> bool:
        """True if no request will come any more, and none waits for a worker."""
        return self._arrivals.exhausted and not self._unplaced and not (self._flow is not None and self._flow.queue)

    def arrive(self, now: int) -> None:
        """Requests come, and are routed by all that is visible by now."""
        self._index_sync.catch_up(now)
        arrivals, placement = self._arrivals, self._placement
        while requests := arrivals.take(now):
            for request in requests:
                if self._begin_window is not None and self._is_warm(now):
                    self._begin_window(now)
                    self._begin_window = None
                record = Record(
                    id=request.id,
                    session=request.session,
                    root=request.root,
                    tenant=request.tenant or request.salt or "",
                    arrival=now,
                    due=-1 if request.session is None else arrivals.recorded(request),
                    tool_call=request.tool_call,
                    input=request.input_length,
                    wanted=request.output_length,
                    request=request,
                )
                if request.prefetch:
                    self.records.open[record.id] = record  # in flight as others, and not in the report
                else:
                    self.records.begin(record)
                if self._autoscaler is not None:
                    self._autoscaler.offered(record.input, record.wanted)
                if placement.open:
                    self._send(record, now)
                else:
                    self._unplaced.append(record)
        self._agenda.put(arrivals.peek(), ARRIVAL)
        self._await_overdue(now)

    def _is_warm(self, now: int) -> bool:
        """True if a request that comes now counts."""
        if self._first < 0:
            self._first = now
        return len(self.records) >= self._warm_up.requests and now - self._first >= self._warm_up.time

    def place_unplaced(self, now: int) -> None:
        """Place the requests that wait for a worker, if any is there."""
        if self._unplaced and self._placement.open:
            self._index_sync.catch_up(now)
            records = self._unplaced.copy()
            self._unplaced.clear()
            for record in records:
                self._send(record, now)

    def grant(self, now: int) -> None:
        """Place requests that flow control holds back, as far as workers have room by now."""
        if self._flow is not None and self._flow.queue and self._placement.open:
            self._index_sync.catch_up(now)
            self._flow.grant(now)
            self._await_overdue(now)

    def _await_overdue(self, now: int) -> None:
        if self._flow is not None:
            self._agenda.put(self._flow.wakes(now), REROUTING, OVERDUE)

    def _send(self, record: Record, now: int) -> None:
        if self._flow is None:
            self._placement.place(record, now)
            return
        why = self._flow.arrive(record, now)
        if why:
            record.status, record.reason, record.ended = "rejected", why, now
            self._close(record, now)

    def fail_unplaced(self, now: int) -> bool:
        """Fail the requests that wait for a worker: none is there, and none will come. Returns whether any waited."""
        records = self._unplaced + (self._flow.drain() if self._flow is not None else [])
        self._unplaced.clear()
        for record in records:
            record.status, record.reason, record.ended = "failed", "no worker was left to take it", now
            self._close(record, now)
        return len(records) > 0

    def ended(self, worker: int, job: Job, record: Record, now: int) -> None:
        self._close(record, now)
        if self._flow is not None and self._flow.ended(worker, record, now):
            self._agenda.put(now, REROUTING, HELD_BACK)

    def _close(self, record: Record, now: int) -> None:
        if self._front_end is not None and record.first_token >= 0:
            outside = self._front_end(record.input)
            record.first_token += outside
            record.ended += outside
        self.records.close(record.id)
        self._arrivals.ended(record.request, now)
        self._agenda.put(self._arrivals.peek(), ARRIVAL)

    def check_through(self) -> None:
        """Raise unless all requests of the trace came and are through."""
        self._arrivals.check_empty()
        left = self.records.open
        assert not left, f"{len(left)} requests never ended, {next(iter(left))} first (I9)"
