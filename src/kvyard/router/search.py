"""The search for the worker of least cost, for every policy that has a cost and for fleets of any size.

Workers come as matches: groups with equal prefixes of the prompt. A small group is looked at worker by worker. A large one
is taken in the order of the policy's rank, as long as the policy's lower bound says that another worker could cost as
little as the least so far. For a policy without a rank every worker is looked at.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from kvyard.index.bits import bits
from kvyard.router.active import ActiveLoads
from kvyard.router.matches import Match
from kvyard.router.ranking import Bucket, as_bytes, is_in, lowest
from kvyard.router.worker import WorkerLoad

Cost: TypeAlias = Callable[[WorkerLoad, Match], float]
"""The cost of one worker, which has ``match`` of the prompt."""
Bound: TypeAlias = Callable[[Match, int, float], float]
"""A lower bound of that for workers of ``match`` in a bucket of the policy's rank, with at least this figure."""
FEW: Final = 32
"""Workers of a match that are looked at one by one rather than by rank."""


class Search:
    """The least cost found so far, and the workers that have it."""

    __slots__ = ("_bound", "_cost", "_loads", "_same", "best", "tied")

    def __init__(self, loads: ActiveLoads, cost: Cost, bound: Bound | None, same_rank_same_cost: bool) -> None:
        """Without ``same_rank_same_cost``, only idle workers of one match and one rank are known to cost the same."""
        self._loads = loads
        self._cost = cost
        self._bound = bound if loads.ranking is not None else None
        self._same = same_rank_same_cost
        self.best = 0.0
        self.tied = 0
        """Slots, as bits; 0 as long as nothing is found."""

    def look(self, matches: Sequence[Match]) -> None:
        """Find the least cost of all workers in ``matches``."""
        workers, cost, bounded = self._loads.workers, self._cost, self._bound is not None
        best, tied = self.best, self.tied
        for match in matches:
            if bounded and match.slots.bit_count() > FEW:
                self.best, self.tied = best, tied
                self._look_by_rank(match)
                best, tied = self.best, self.tied
                continue
            for slot in bits(match.slots):
                value = cost(workers[slot], match)
                if not tied or value < best:
                    best, tied = value, 1 << slot
                elif value == best:
                    tied |= 1 << slot
        self.best, self.tied = best, tied

    def _look_by_rank(self, match: Match) -> None:
        """Find the least cost of one match, bucket by bucket."""
        ranking, bound = self._loads.ranking, self._bound
        assert ranking is not None and bound is not None
        row = as_bytes(match.slots)
        for number in ranking.order:
            bucket = ranking.buckets[number]
            if not self.tied or bound(match, number, bucket.figures[0]) <= self.best:
                self._look_at_bucket(match, row, number, bucket)  # its first entry is within the bound
            elif bound(match, number, 0.0) > self.best:
                break  # so is that of all later buckets

    def _look_at_bucket(self, match: Match, row: bytes, number: int, bucket: Bucket) -> None:
        bound, cost, workers = self._bound, self._cost, self._loads.workers
        assert bound is not None
        within, skipped = True, 0
        for figure, single in zip(bucket.figures, bucket.single_slots):
            member = single < 0 or is_in(row, single)
            if not member:
                skipped += 1
                if skipped & 7:
                    within = False
                    continue  # the bound of every eighth will do
            if not within and self.tied and bound(match, number, figure) > self.best:
                return
            within = False
            if single >= 0:
                if member:
                    self._note(cost(workers[single], match), 1 << single)
                continue
            slots = bucket.many(figure) & match.slots
            alike = slots if self._same else slots & self._loads.idle
            if alike:
                self._note(cost(workers[lowest(alike)], match), alike)
            if alike != slots:
                for slot in bits(slots ^ alike):
                    self._note(cost(workers[slot], match), 1 << slot)

    def _note(self, value: float, slots: int) -> None:
        """Note that the workers ``slots`` cost ``value`` each."""
        if not self.tied or value < self.best:
            self.best, self.tied = value, slots
        elif value == self.best:
            self.tied |= slots
