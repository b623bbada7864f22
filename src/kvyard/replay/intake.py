"""The intake: takes requests from the trace as they come, has them placed, and closes their records when they are through."""

from collections.abc import Callable

from kvyard.engine.job import Job
from kvyard.replay.agenda import ARRIVAL, HELD_BACK, OVERDUE, REROUTING, Agenda
from kvyard.replay.arrivals import Arrivals
from kvyard.replay.flow import FleetFlow
from kvyard.replay.index_sync import IndexSync
from kvyard.replay.listeners import RequestListener
from kvyard.replay.placement import Placement
from kvyard.replay.record import Record
from kvyard.replay.records import Records
from kvyard.replay.rendering import Rendering
from kvyard.replay.scaling.autoscaler import Autoscaler
from kvyard.replay.warm_up import NO_WARM_UP, WarmUp


class Intake(RequestListener):
    """Intake of one run."""

    def __init__(
        self,
        agenda: Agenda,
        arrivals: Arrivals,
        records: Records,
        placement: Placement,
        *,
        unplaced: list[Record],
        index_sync: IndexSync,
        autoscaler: Autoscaler | None,
        warm_up: WarmUp = NO_WARM_UP,
        begin_window: Callable[[int], None] | None = None,
        front_end: Callable[[int], int] | None = None,
        flow: FleetFlow | None = None,
        rendering: Rendering | None = None,
    ) -> None:
        """``unplaced`` are requests that came when no worker took any, or have lost theirs. ``begin_window`` is called before
        the first request that isn't for ``warm_up`` any more. ``front_end`` gives the nanoseconds that a prompt's tokens take
        outside of the engine, which clients wait for. ``flow`` holds requests back while workers have enough, ``rendering``
        until their prompts are tokenized.
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
        self._rendering = rendering
        self._first = -1
        """Time of the first request."""
        self._await_arrival()

    @property
    def exhausted(self) -> bool:
        """True if no request will come any more, and none waits for a worker."""
        if self._rendering is not None and self._rendering.due() is not None:
            return False
        return self._arrivals.exhausted and not self._unplaced and not (self._flow is not None and self._flow.queue)

    def arrive(self, now: int) -> None:
        """Route requests that arrive now, by all that is visible by now."""
        self._index_sync.catch_up(now)
        arrivals, rendering = self._arrivals, self._rendering
        while requests := arrivals.take(now):
            for request in requests:
                if self._begin_window is not None and self._is_warm(now):
                    self._begin_window(now)
                    self._begin_window = None
                due = -1 if request.session is None else arrivals.recorded(request)
                record = Record(request=request, arrival=now, due=due)
                if request.prefetch:
                    self.records.open[request.id] = record  # in flight as others, and not in the report
                else:
                    self.records.begin(record)
                if self._autoscaler is not None:
                    self._autoscaler.offered(request.input_length, request.output_length)
                if rendering is not None:
                    rendering.submit(record, now)
                else:
                    self._place(record, now)
        if rendering is not None:
            for record in rendering.take(now):
                self._place(record, now)
        self._await_arrival()
        self._await_overdue(now)

    def _place(self, record: Record, now: int) -> None:
        if self._placement.open:
            self._send(record, now)
        else:
            self._unplaced.append(record)

    def _await_arrival(self) -> None:
        """Have ``arrive`` called when the next request comes, or is tokenized."""
        due = self._arrivals.peek()
        rendered = None if self._rendering is None else self._rendering.due()
        if rendered is not None and (due is None or rendered < due):
            due = rendered
        self._agenda.put(due, ARRIVAL)

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
        request, arrivals = record.request, self._arrivals
        if record.first_token >= 0:
            outside = 0 if self._front_end is None else self._front_end(request.input_length)
            record.first_token = arrivals.observed(request, record.first_token + outside)
            record.ended = now = arrivals.observed(request, record.ended + outside)
        self.records.close(request.id)
        arrivals.ended(request, now)
        self._await_arrival()

    def check_through(self) -> None:
        """Raise unless all requests of the trace came and are through."""
        self._arrivals.check_empty()
        left = self.records.open
        assert not left, f"{len(left)} requests never ended, {next(iter(left))} first (I9)"
