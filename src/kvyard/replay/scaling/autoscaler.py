"""The autoscaler: carries out a scaling policy's number of workers in the time of the replay.

A worker that is started takes requests after its start-up time, with cold caches. One that is stopped takes no more
requests, ends when its requests have ended, and loses its caches then; with ``warm`` it keeps them until it is started
again. Start-ups in flight are cancelled before any worker is stopped. All roles are changed at the same instant.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from kvyard.clock import MS, SECOND
from kvyard.engine.job import Job
from kvyard.engine.role import Role
from kvyard.replay.config import AutoscaleConfig, WorkerConfig
from kvyard.replay.listeners import RequestListener
from kvyard.replay.record import Record
from kvyard.replay.scaling import RoleState, Snapshot, make_scaler
from kvyard.replay.worker import Worker
from kvyard.replay.worker_lifecycle import WorkerLifecycle
from kvyard.router.pace import Pace, engine_pace


class WorkerPhase(Enum):
    """State of a worker."""

    OFF = "off"
    STARTING = "starting"
    ACTIVE = "active"
    DRAINING = "draining"


class ScalingAction(NamedTuple):
    """A change of the number of workers."""

    at_s: float
    role: Role
    before: int
    """Workers that are active or starting."""
    after: int


class ScaledWorker:
    """One worker that may come and go."""

    def __init__(self, worker: Worker, pace: Pace, slots: int, active: bool) -> None:
        self.worker = worker
        self.pace = pace
        self.slots = slots
        self.state = WorkerPhase.ACTIVE if active else WorkerPhase.OFF
        self.ready = 0
        """Time at which it will have started."""
        self.since = 0
        """Time at which it was last started."""
        self.spans: list[tuple[int, int]] = []
        """Intervals in which it was on, up to its latest stop."""
        self.idle_from = 0
        """End of the last of its requests."""


class Autoscaler(RequestListener):
    """Autoscaler of one fleet. It starts, drains and stops workers."""

    def __init__(
        self,
        config: AutoscaleConfig,
        workers: Sequence[Worker],
        kinds: Sequence[WorkerConfig],
        lifecycle: WorkerLifecycle,
    ) -> None:
        """``kinds`` has one kind of workers for each role; those of ``workers`` that are alive take requests."""
        self.config = config
        self._scaler = make_scaler(config.policy, config.options)
        self._lifecycle = lifecycle
        engines = {kind.engine.role: kind.engine for kind in kinds}
        paces = {role: engine_pace(engine) for role, engine in engines.items()}
        self._workers = [
            ScaledWorker(worker, paces[worker.role], engines[worker.role].max_num_seqs, worker.alive)
            for worker in workers
        ]
        self.roles: list[Role] = list(dict.fromkeys(worker.role for worker in workers))
        self.actions: list[ScalingAction] = []
        self.lost_blocks = 0
        """Cached blocks of workers that were switched off."""
        self.stops = 0
        self.cancelled = 0
        """Start-ups that were cancelled."""
        self._last = 0
        self._offered = [0, 0, 0]
        self._ttfts: list[float] = []
        self._admitted = [0, 0]

    def begin(self, now: int) -> int:
        """Start counting workers at the first request. Returns when to ask the policy for the first time."""
        self._last = now
        for scaled in self._workers:
            scaled.since = scaled.idle_from = now
        return now + self.config.period

    # -- what happens -------------------------------------------------------------------------------------------------

    def offered(self, input_tokens: int, output_tokens: int) -> None:
        """Count a request that arrived."""
        counts = self._offered
        counts[0] += 1
        counts[1] += input_tokens
        counts[2] += output_tokens

    def first_token(self, record: Record, now: int) -> None:
        self._ttfts.append(record.ttft / MS)
        self._admitted[0] += record.cached + sum(record.loaded)
        self._admitted[1] += record.input

    def computed(self, worker: int, job: Job, record: Record, now: int) -> None:
        self._workers[worker].idle_from = now

    def ended(self, worker: int, job: Job, record: Record, now: int) -> None:
        self._workers[worker].idle_from = now

    # -- what is done about it ----------------------------------------------------------------------------------------

    def tick(self, now: int) -> int:
        """Start and stop what is due, and ask the scaling policy. Returns when to come back."""
        self._progress(now)
        if now - self._last >= self.config.period:
            wanted = self._scaler.wanted(self._snapshot(now))
            for role in self.roles:
                if role in wanted:
                    self._scale(role, wanted[role], now)
            self._last = now
            self._offered, self._ttfts, self._admitted = [0, 0, 0], [], [0, 0]
            self._progress(now)
        ready = [scaled.ready for scaled in self._workers if scaled.state is WorkerPhase.STARTING]
        return min([self._last + self.config.period, *ready])

    def _progress(self, now: int) -> None:
        for scaled in self._workers:
            if scaled.state is WorkerPhase.STARTING and scaled.ready <= now:
                scaled.state = WorkerPhase.ACTIVE
                self._lifecycle.start(scaled.worker, now)
            elif scaled.state is WorkerPhase.DRAINING and not scaled.worker.jobs and _rests(scaled.worker):
                scaled.state = WorkerPhase.OFF
                scaled.spans.append((scaled.since, max(scaled.idle_from, scaled.since)))
                self.stops += 1
                self.lost_blocks += self._lifecycle.stop(scaled.worker, now)

    def _snapshot(self, now: int) -> Snapshot:
        return Snapshot(
            now_s=now / SECOND,
            period_s=max(1, now - self._last) / SECOND,
            roles={role: self._state(role) for role in self.roles},
            requests=self._offered[0],
            input_tokens=self._offered[1],
            output_tokens=self._offered[2],
            cached_tokens=self._admitted[0],
            admitted_tokens=self._admitted[1],
            ttfts_ms=self._ttfts,
            startup_s=self.config.startup / SECOND,
        )

    def _state(self, role: Role) -> RoleState:
        mine = [scaled for scaled in self._workers if scaled.worker.role == role]
        counts = {state: sum(scaled.state is state for scaled in mine) for state in WorkerPhase}
        cores = [core for scaled in mine if scaled.state is WorkerPhase.ACTIVE for core in scaled.worker.cores]
        loading = [core.scheduler.jobs.parked for core in cores]
        return RoleState(
            role=role,
            active=counts[WorkerPhase.ACTIVE],
            starting=counts[WorkerPhase.STARTING],
            draining=counts[WorkerPhase.DRAINING],
            running=sum(len(core.scheduler.running) for core in cores),
            waiting=sum(len(core.scheduler.waiting) for core in cores) + sum(map(len, loading)),
            used=sum(core.scheduler.manager.usage for core in cores) / len(cores) if cores else 0.0,
            pace=mine[0].pace,
            slots=mine[0].slots,
        )

    def _scale(self, role: Role, wanted: int, now: int) -> None:
        mine = [scaled for scaled in self._workers if scaled.worker.role == role]
        there = [scaled for scaled in mine if scaled.state in (WorkerPhase.ACTIVE, WorkerPhase.STARTING)]
        target = min(len(mine), self.config.most, max(self.config.least, wanted))
        if target == len(there):
            return
        if target > len(there):
            # Those that still drain are there at once, and so are their caches.
            back = [scaled for scaled in mine if scaled.state is WorkerPhase.DRAINING]
            off = [scaled for scaled in mine if scaled.state is WorkerPhase.OFF]
            for scaled in (back + off)[: target - len(there)]:
                if scaled.state is WorkerPhase.DRAINING:
                    scaled.state = WorkerPhase.ACTIVE
                    self._lifecycle.start(scaled.worker, now)
                else:
                    scaled.state, scaled.ready, scaled.since = WorkerPhase.STARTING, now + self.config.startup, now
        else:
            for scaled in self._leaving(there)[: len(there) - target]:
                if scaled.state is WorkerPhase.STARTING:
                    scaled.state = WorkerPhase.OFF
                    scaled.spans.append((scaled.since, now))
                    self.cancelled += 1
                else:
                    scaled.state = WorkerPhase.DRAINING
                    scaled.idle_from = now
                    self._lifecycle.drain(scaled.worker, now)
        self.actions.append(ScalingAction(now / SECOND, role, len(there), target))

    def _leaving(self, there: Sequence[ScaledWorker]) -> list[ScaledWorker]:
        """Return workers in the order in which they are removed: starting ones first, the last to be ready before the others;
        then those with the fewest requests.
        """
        starting = [scaled for scaled in there if scaled.state is WorkerPhase.STARTING]
        active = [scaled for scaled in there if scaled.state is WorkerPhase.ACTIVE]
        starting.sort(key=lambda scaled: (-scaled.ready, -scaled.worker.number))
        active.sort(key=lambda scaled: (len(scaled.worker.jobs), -scaled.worker.number))
        return starting + active

    def on_seconds(self, role: Role, now: int) -> float:
        """Return seconds that workers of ``role`` were on, together, from their start until they were off: their cost."""
        return sum(end - start for start, end in self.spans(role, now)) / SECOND

    def spans(self, role: Role, now: int) -> list[tuple[int, int]]:
        """Return when each worker of ``role`` was on, in nanoseconds up to ``now``."""
        spans = []
        for scaled in self._workers:
            if scaled.worker.role == role:
                spans += scaled.spans
                if scaled.state is not WorkerPhase.OFF:
                    spans.append((scaled.since, now))
        return spans


def _rests(worker: Worker) -> bool:
    """True if nothing of ``worker`` moves any more."""
    for core in worker.cores:
        jobs = core.scheduler.jobs
        if core.busy or jobs.parked or jobs.leaving or core.next_landing() is not None:
            return False
    return True
