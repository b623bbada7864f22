"""A worker pool: one router and the workers that it chooses among."""

from collections.abc import Collection

from kvyard.engine.role import Role
from kvyard.index import Holder
from kvyard.replay.worker import Worker
from kvyard.router import Decision, Router
from kvyard.router.active import Booking
from kvyard.router.request import Prompt


class WorkerPool:
    """Workers of all roles, or of all roles but one. Workers of the excluded role may be added, drained and removed without
    effect."""

    def __init__(self, router: Router, excluded: Role | None = None) -> None:
        self.router = router
        self.open = 0
        """Ranks that take requests."""
        self._excluded = excluded
        self._ranks: dict[Holder, tuple[Worker, int]] = {}

    def __contains__(self, holder: Holder) -> bool:
        return holder in self._ranks

    def add(self, worker: Worker) -> None:
        """Send requests to ``worker``."""
        if worker.role == self._excluded:
            return
        worker.began = True
        for rank, holder in enumerate(worker.holders):
            self.open += 1
            self._ranks[holder] = (worker, rank)
            self.router.add_worker(holder, worker.role, worker.pace)

    def drain(self, worker: Worker) -> None:
        """Send no more requests to ``worker``."""
        if worker.role == self._excluded:
            return
        for holder in worker.holders:
            self.open -= 1
            self.router.drain(holder)

    def remove(self, worker: Worker) -> None:
        """Remove ``worker``, which is drained, and its contents."""
        if worker.role == self._excluded:
            return
        for holder in worker.holders:
            self.router.remove_worker(holder)

    def assign(self, request: Prompt, now: int, exclude: Collection[Holder] = ()) -> tuple[Booking, Worker, int]:
        """Choose a worker and one of its ranks, none of ``exclude``, and book the request there."""
        booking = self.router.assign(request, now, exclude)
        worker, rank = self._ranks[booking.worker.name]
        return booking, worker, rank

    def preview(self, request: Prompt, now: int) -> tuple[Decision, Worker]:
        """Return the choice that ``assign`` would make, without booking it."""
        decision = self.router.preview(request, now)
        return decision, self._ranks[decision.worker][0]
