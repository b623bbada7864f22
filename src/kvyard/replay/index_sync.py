"""Keeps the router's index up to date: before a routing decision it sees every cache change that is visible by then.

An engine's plan may have ended passes that were not carried out yet. If it is known when caches next change, only workers whose
caches changed are visited; otherwise all are.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from kvyard.index.runs import RunIndexer
from kvyard.replay.worker import Worker


class IndexSync:
    """Between the workers of a fleet and the index; without an index there is nothing to do."""

    def __init__(self, indexer: RunIndexer | None, workers: Sequence[Worker], follows: bool) -> None:
        """``follows``: caches change by a worker's own passes alone, and by what begins or ends one of them. Then ``workers``
        are all workers, by number.
        """
        self.follows = follows and indexer is not None
        self._indexer = indexer
        self._workers = workers
        self._changes: list[tuple[int, int]] = []
        """Next change of caches, and its worker, as a heap; entries that aren't in ``_next_change`` are void."""
        self._next_change = [-1] * len(workers)

    def catch_up(self, now: int) -> None:
        """Let the index see everything that is visible by ``now``."""
        if self._indexer is None:
            return
        if self.follows:
            changes = self._changes
            while changes and changes[0][0] <= now:
                when, number = heappop(changes)
                worker = self._workers[number]
                if worker.alive and self._next_change[number] == when:
                    worker.engine.advance(now)
                    self.follow(worker)
        else:
            for worker in self._workers:
                if worker.alive:
                    worker.engine.advance(now)
        self._indexer.flush(now)

    def follow(self, worker: Worker) -> None:
        """Note when the caches of ``worker``, which started a pass, next change, unless that is when its plan ends: that is on
        the agenda.
        """
        engine = worker.engine
        when = engine.next_change()
        if when is None or when == engine.next_decision():
            self._next_change[worker.number] = -1
        elif when != self._next_change[worker.number]:
            self._next_change[worker.number] = when
            heappush(self._changes, (when, worker.number))
