"""``load-aware``: the share of the prompt that is cached, less what the worker has beyond the mean of requests.

Source: vLLM production-stack #1035: argmax of match / prompt - beta * (load - mean) / max(1, mean), beta 1.
"""

from collections.abc import Mapping
from statistics import fmean
from typing import ClassVar

from kvyard.router.inputs import Choice, RoutingInput, least
from kvyard.router.policies import Policy


class LoadAware(Policy):
    needs_index = True
    OPTIONS: ClassVar[Mapping[str, float]] = {"beta": 1.0}

    def choose(self, at: RoutingInput) -> Choice:
        return least(at.slots, self.costs(at), at.rng, "cost")

    def costs(self, at: RoutingInput) -> list[float]:
        requests, slots, tokens = at.loads.requests, at.slots, at.request.num_tokens
        mean = fmean(requests[slot] for slot in slots)
        beta = self.options["beta"] / max(1.0, mean)
        return [beta * (requests[slot] - mean) - at.cached(slot) / tokens for slot in slots]
