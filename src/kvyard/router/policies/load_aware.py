"""``load-aware``: the share of the prompt that is cached, less what the worker has beyond the mean of requests.

Source: vLLM production-stack #1035: argmax of match / prompt - beta * (load - mean) / max(1, mean), beta 1.
"""

from statistics import fmean
from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.router.active import REQUESTS
from kvyard.router.config import RouterConfig
from kvyard.router.inputs import Choice, RoutingInput, least, least_of
from kvyard.router.policies import Policy
from kvyard.router.ranking import classes

_LEAST = 1e-6
"""With a beta below, costs of different loads might be rounded to the same."""


class LoadAware(Policy):
    needs_index = True
    OPTIONS: ClassVar[Options] = {
        "beta": Option(1.0, "Weight of load beyond the mean, against the cached share of the prompt."),
    }

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self.ranked_by = REQUESTS if self.options["beta"] >= _LEAST else 0

    def choose(self, at: RoutingInput) -> Choice:
        if at.sparse:
            return self._candidate(at)
        return least(at.slots, self.costs(at), at.rng, "cost")

    def costs(self, at: RoutingInput) -> list[float]:
        requests, slots, tokens = at.loads.requests, at.slots, at.request.num_tokens
        mean = fmean(requests[slot] for slot in slots)
        beta = self.options["beta"] / max(1.0, mean)
        return [beta * (requests[slot] - mean) - at.cached(slot) / tokens for slot in slots]

    def _candidate(self, at: RoutingInput) -> Choice:
        """The same, by the fewest requests of those that have equally much of the prompt."""
        loads, tokens = at.loads, at.request.num_tokens
        assert loads.ranking is not None
        mean = (loads.total - sum([loads.requests[slot] for slot in at.closed()])) / len(at.slots)
        beta = self.options["beta"] / max(1.0, mean)
        best, found = 0.0, 0
        for blocks, holders in classes(at.prefixes.levels, at.among) if at.prefixes is not None else [(0, at.among)]:
            _, requests, slots = loads.ranking.least(holders)
            cached = at.tokens_of(blocks) if at.prefixes is not None else 0
            cost = beta * (requests - mean) - cached / tokens
            if not found or cost < best:
                best, found = cost, slots
            elif cost == best:
                found |= slots
        return least_of(found, best, at.rng, "cost")
