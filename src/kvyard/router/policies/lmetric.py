"""``lmetric``: the least product of prompt tokens left to compute and batch size, both with this request.

Source: LMetric, arXiv 2603.15202 (SJTU and Alibaba): the product needs no weights. The batch size counts the request that is
routed, so that an idle worker's product isn't 0 whatever it would have to compute.
"""

from kvyard.router.matches import Match
from kvyard.router.policies import Policy
from kvyard.router.worker import WorkerLoad


class LMetric(Policy):
    needs_index = True
    guarded = True

    def cost(self, worker: WorkerLoad, match: Match) -> float:
        return float((worker.prefill_tokens + match.new_tokens) * (worker.requests + 1))
