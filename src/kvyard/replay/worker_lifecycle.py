"""Lifecycle of workers: they start, drain, stop and fail, as planned in the config or as an autoscaler decides."""

from kvyard.index.runs import RunIndexer
from kvyard.replay.agenda import PASS_END, REROUTING, WORKER_CHANGE, Agenda
from kvyard.replay.config import AutoscaleConfig
from kvyard.replay.placement import Placement
from kvyard.replay.pulls import FleetPulls
from kvyard.replay.record import Record
from kvyard.replay.seen import Seen
from kvyard.replay.worker import Worker


class WorkerLifecycle:
    """Starts, drains, stops and failures of one fleet's workers."""

    def __init__(
        self,
        agenda: Agenda,
        placement: Placement,
        in_flight: dict[str, Record],
        unplaced: list[Record],
        *,
        indexer: RunIndexer | None,
        pulls: FleetPulls | None,
        seen: Seen,
        autoscale: AutoscaleConfig | None,
    ) -> None:
        """``in_flight`` are the records of requests that aren't through, by id; ``unplaced`` receives those that lose their
        worker.
        """
        self.planned: list[tuple[Worker, str]] = []
        """Planned changes, by the number that they have on the agenda."""
        self._agenda = agenda
        self._placement = placement
        self._in_flight = in_flight
        self._unplaced = unplaced
        self._indexer = indexer
        self._pulls = pulls
        self._seen = seen
        self._withdraws = autoscale is not None and autoscale.moves
        self._keeps_caches = autoscale is not None and autoscale.warm

    def plan(self, worker: Worker, start: int, drain: int | None, fail: int | None) -> None:
        """Plan the changes of ``worker``, which takes requests from the beginning if it is alive."""
        if worker.alive:
            self._open(worker)
        for when, what in ((start, "start"), (drain, "drain"), (fail, "fail")):
            if when:
                self._agenda.put(when, WORKER_CHANGE, len(self.planned))
                self.planned.append((worker, what))

    def carry_out(self, which: int, now: int) -> None:
        """Start, drain or fail a worker as planned."""
        worker, what = self.planned[which]
        if what == "start":
            worker.alive = True
            self._open(worker)
            self._agenda.put(now, REROUTING)
            return
        if not worker.draining:
            self.drain(worker, now)
        if what == "fail":
            self._fail(worker, now)

    def start(self, worker: Worker, now: int) -> None:
        """Let ``worker`` take requests from now on, for the first time or again."""
        worker.alive, worker.draining = True, False
        self._open(worker)
        if self._pulls is not None:
            self._pulls.back(worker)
        self._agenda.put(now + 1, REROUTING)  # requests of this instant have been routed

    def drain(self, worker: Worker, now: int) -> None:
        """Send no more requests to ``worker``; those that wait there may go elsewhere."""
        worker.draining = True
        for pool in self._placement.pools:
            pool.drain(worker)
        if self._withdraws:
            ids = self._placement.withdraw(worker, now)
            if ids:
                self._unplaced.extend([self._in_flight[id_] for id_ in ids])
                self._agenda.put(now + 1, REROUTING)

    def stop(self, worker: Worker, now: int) -> int:
        """Switch off ``worker``, which has nothing to do; returns how many cached blocks went with it."""
        lost = 0
        if self._pulls is not None:
            self._pulls.leave(worker, now)
            for core in worker.cores:
                if core.offload is not None:
                    core.offload.tick(now)  # what it pulled is given up, too
        for core in worker.cores:
            if not self._keeps_caches:
                pools = [core.scheduler.manager.pool]
                if core.offload is not None:
                    pools += [tier.store.pool for tier in core.offload.tiers if not tier.shared]
                for pool in pools:
                    lost += pool.num_blocks - 1 - pool.unnamed
                    pool.reset()
            core.begin(now)  # announces it
        if lost:
            for recorder in worker.recorders:
                self._seen.switched_off(recorder.number)
        worker.alive = False
        return lost

    def _open(self, worker: Worker) -> None:
        for pool in self._placement.pools:
            pool.add(worker)

    def _fail(self, worker: Worker, now: int) -> None:
        """Remove ``worker``; its requests start over."""
        worker.alive = False
        self._agenda.put(None, PASS_END, worker.number)
        self._agenda.put(now, REROUTING)
        worker.engine.advance(now)
        for core in worker.cores:
            core.report()
        for pool in self._placement.pools:
            pool.remove(worker)
        if self._indexer is not None and worker.cores[0].batcher is not None:
            for holder in worker.holders:
                self._indexer.detach(holder)
        for core in worker.cores:
            if core.offload is not None:
                core.offload.close(now)
        if self._pulls is not None:
            self._pulls.leave(worker, now)
        for id_ in self._placement.lose(worker, now):
            record = self._in_flight[id_]
            record.start_over()
            self._unplaced.append(record)
        worker.jobs.clear()
