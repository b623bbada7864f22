"""``load-aware``: the share of the prompt that is cached, less what the worker has beyond the mean of requests.

Source: vLLM production-stack #1035: argmax of match / prompt - beta * (load - mean) / max(1, mean), beta 1.
"""

from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.router.inputs import RoutingInput
from kvyard.router.matches import Match
from kvyard.router.policies import CostModel, Policy
from kvyard.router.worker import WorkerLoad


class LoadAware(Policy):
    needs_index = True
    OPTIONS: ClassVar[Options] = {
        "beta": Option(1.0, "Weight of load beyond the mean, against the cached share of the prompt."),
    }
    _mean = 0.0
    _tokens = 1

    def costs(self, routing: RoutingInput) -> CostModel:
        self._mean, self._tokens = routing.mean_requests, routing.num_tokens
        return self

    def cost(self, worker: WorkerLoad, match: Match) -> float:
        beta = self.options["beta"] / max(1.0, self._mean)
        return beta * (worker.requests - self._mean) - match.cached_tokens / self._tokens
