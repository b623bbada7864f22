"""Placements: the choice of a worker for a request, and the next step when a stage of it ends.

In a fleet without roles one worker computes a request whole (``WholePlacement``). Where workers have roles, the prompt may be
computed by one worker and the answer by another (``split_placement``).
"""

from collections.abc import Collection, Sequence
from typing import Protocol

from kvyard.blocks.use import NO_FACTS
from kvyard.engine.job import Job
from kvyard.index import Holder
from kvyard.replay.jobs import JobMaker
from kvyard.replay.listeners import RequestListener
from kvyard.replay.pulls import FleetPulls
from kvyard.replay.record import Record
from kvyard.replay.worker import Worker
from kvyard.replay.worker_pool import WorkerPool
from kvyard.router.request import Hold


class Placement(Protocol):
    """Interface of a placement, which is also a ``RequestListener``."""

    pools: Sequence[WorkerPool]
    """The pools that workers are added to."""

    @property
    def open(self) -> bool:
        """True if any worker accepts requests."""

    def place(self, record: Record, now: int) -> None:
        """Choose a worker for a request and submit it there. Only while ``open``."""

    def passes_started(self, now: int) -> None:
        """Called after workers have started their passes at ``now``."""

    def hand_over(self, now: int) -> None:
        """Called after transfers between workers landed, or prompts were computed, at ``now``."""

    def resume(self, now: int) -> None:
        """Continue started requests that wait for a worker, if one is available now."""

    def withdraw(self, worker: Worker, now: int) -> list[str]:
        """Take back the requests that wait at ``worker``, which drains, so that they are placed again; returns their ids."""

    def lose(self, worker: Worker, now: int) -> list[str]:
        """``worker`` has failed: give up the requests that can't go on without it; returns their ids."""


class WholePlacement(RequestListener):
    """One worker computes a request's prompt and its answer."""

    def __init__(self, pool: WorkerPool, jobs: JobMaker, block_size: int, pulls: FleetPulls | None) -> None:
        self.pool = pool
        self.pools: Sequence[WorkerPool] = (pool,)
        self._jobs = jobs
        self._block_size = block_size
        self._pulls = pulls

    @property
    def open(self) -> bool:
        return self.pool.open > 0

    def place(self, record: Record, now: int) -> None:
        self.send(record, now)

    def hold(self, record: Record, now: int, full: Collection[Holder]) -> Hold | None:
        """Return the worker of ``full``, all without room, that a request should wait for; ``None`` to place it elsewhere."""
        router = self.pool.router
        if not router.policy.waits:
            return None
        job = self._jobs.make(record, self._block_size, NO_FACTS)
        return router.hold(job, now, full)

    def send(self, record: Record, now: int, exclude: Collection[Holder] = ()) -> Worker:
        """Like ``place``, to none of the ranks in ``exclude``; returns the worker."""
        facts = self._jobs.facts(record)
        job = self._jobs.make(record, self._block_size, facts)
        booking, worker, rank = self.pool.assign(job, now, exclude)
        record.worker = worker.name_of(rank)
        record.overlap, record.best_overlap = booking.overlap, booking.best
        if self._pulls is not None:
            self._pulls.expect(job, booking, self.pool.router.load)
        if worker.block_size != self._block_size:
            job = self._jobs.make(record, worker.block_size, facts)
        worker.submit(job, now, rank)
        return worker

    def first_token(self, record: Record, now: int) -> None:
        self.pool.router.prefill_done(record.request.id, now)

    def ended(self, worker: int, job: Job, record: Record, now: int) -> None:
        self.pool.router.finished(record.request.id, now)

    def passes_started(self, now: int) -> None:
        pass

    def hand_over(self, now: int) -> None:
        pass

    def resume(self, now: int) -> None:
        pass

    def withdraw(self, worker: Worker, now: int) -> list[str]:
        """Take back requests of which nothing is computed."""
        ids = []
        worker.engine.advance(now)
        for rank, core in enumerate(worker.cores):
            for job in [job for job in core.scheduler.waiting if not job.tables and not job.output]:
                worker.withdraw(job, now, rank)
                self.pool.router.finished(job.id, now)
                ids.append(job.id)
        worker.touch()
        return ids

    def lose(self, worker: Worker, now: int) -> list[str]:
        return list(worker.jobs)
