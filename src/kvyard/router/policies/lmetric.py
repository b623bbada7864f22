"""``lmetric``: the least product of prompt tokens left to compute and batch size, both with this request.

Source: LMetric, arXiv 2603.15202 (SJTU and Alibaba): the product needs no weights. The batch size counts the request that is
routed, so that an idle worker's product isn't 0 whatever it would have to compute.
"""

from kvyard.router.inputs import Choice, RoutingInput, least
from kvyard.router.policies import Policy


class LMetric(Policy):
    needs_index = True
    guarded = True

    def costs(self, at: RoutingInput) -> list[float]:
        return [float(at.work(slot) * (at.loads.requests[slot] + 1)) for slot in at.slots]

    def choose(self, at: RoutingInput) -> Choice:
        return least(at.slots, self.costs(at), at.rng, "cost")
