"""``lmetric``: the least product of prompt tokens left to compute and batch size, both with this request.

Source: LMetric, arXiv 2603.15202 (SJTU and Alibaba): the product needs no weights. The batch size counts the request that is
routed, so that an idle worker's product isn't 0 whatever it would have to compute.
"""

from kvyard.router.active import BATCH
from kvyard.router.inputs import Choice, RoutingInput, least, least_of
from kvyard.router.policies import Policy
from kvyard.router.ranking import classes


class LMetric(Policy):
    needs_index = True
    guarded = True
    ranked_by = BATCH

    def costs(self, at: RoutingInput) -> list[float]:
        return [float(at.work(slot) * (at.loads.requests[slot] + 1)) for slot in at.slots]

    def choose(self, at: RoutingInput) -> Choice:
        if at.sparse:
            return self._candidate(at)
        return least(at.slots, self.costs(at), at.rng, "cost")

    def _candidate(self, at: RoutingInput) -> Choice:
        """The same, by the fewest tokens that wait at any with so many requests, of those that have equally much."""
        ranking = at.loads.ranking
        assert ranking is not None
        best, found = 0, 0
        for blocks, holders in classes(at.prefixes.levels, at.among) if at.prefixes is not None else [(0, at.among)]:
            own = at.request.num_tokens - (at.tokens_of(blocks) if at.prefixes is not None else 0)
            for requests, waiting, slots in ranking.firsts(holders):
                cost = (int(waiting) + own) * (requests + 1)
                if not found or cost < best:
                    best, found = cost, slots
                elif cost == best:
                    found |= slots
        return least_of(found, float(best), at.rng, "cost")
