"""The passes of all workers: they end and start at the agenda's instants, and are sampled in between."""

from collections.abc import Sequence

from kvyard.replay.agenda import LANDING, PASS_END, Agenda
from kvyard.replay.index_sync import IndexSync
from kvyard.replay.shared import SharedTiers
from kvyard.replay.worker import SampleSeries, Worker


class Passes:
    """Passes of one fleet. A worker is visited only when something happened to it."""

    def __init__(
        self,
        agenda: Agenda,
        workers: Sequence[Worker],
        touched: set[int],
        shared: SharedTiers,
        index_sync: IndexSync,
        *,
        pulling: bool,
        steady: bool,
    ) -> None:
        """``touched`` are the numbers of workers that something happened to at this instant. ``pulling``: a worker that starts
        a pass may touch others. ``steady``: a worker that starts no pass, and has none in flight, stays as it is.
        """
        self.touched = touched
        self._agenda = agenda
        self._workers = workers
        self._shared = shared
        self._index_sync = index_sync
        self._pulling = pulling
        self._unsampled: set[int] | None = set() if steady else None
        """Workers that may have changed since the latest sample, if that is known."""

    def end(self, number: int, now: int) -> None:
        """End the plan of a worker."""
        self._workers[number].engine.advance(now)
        self.touched.add(number)

    def start(self, now: int) -> None:
        """Have workers that something happened to start passes, in the order of their numbers."""
        touched = self.touched
        ready = sorted(touched)
        touched.clear()
        if self._unsampled is not None:
            self._unsampled.update(ready)
        if self._shared.active:
            self._start_together(ready, now)
            return
        follows = self._index_sync.follows
        done = 0
        while done < len(ready):
            number = ready[done]
            done += 1
            worker = self._workers[number]
            if worker.alive:
                worker.engine.begin(now)
                self._agenda.put(worker.engine.next_decision(), PASS_END, number)
                if follows:
                    self._index_sync.follow(worker)
            if self._pulling and touched:
                # If one that is pulled from has a pass to start too, it starts in its turn.
                later = [other for other in touched if other > number]
                if later:
                    touched.difference_update(later)
                    ready = sorted({*ready[done:], *later})
                    done = 0

    def _start_together(self, ready: Sequence[int], now: int) -> None:
        """Start passes of workers that share tiers: each start may change what the others can plan."""
        self._shared.begin(now, ready, self._workers)
        for worker in self._workers:
            if worker.alive:
                self._agenda.put(worker.engine.next_decision(), PASS_END, worker.number)
        self._agenda.put(self._shared.due(), LANDING)

    def sample(self, now: int, series: SampleSeries) -> int:
        """Add a point to ``series``; returns when to add the next."""
        changed = self._unsampled
        for worker in self._workers if changed is None else [self._workers[number] for number in changed]:
            if worker.alive:
                worker.engine.advance(now)
                for core in worker.cores:
                    core.occupy()
        if self._shared.active:
            self._shared.land(now)
        when = series.sample(now, self._workers, changed)
        if changed is not None:
            self._unsampled = {number for number in changed if self._workers[number].engine.next_decision() is not None}
        return when

    def report(self) -> None:
        """Have engines report the passes that are carried out and that they haven't reported yet."""
        for worker in self._workers:
            for core in worker.cores:
                core.report()
