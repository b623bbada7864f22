"""``cache-aware``: the least loaded while loads are far apart; else the best match, if it is a good one; else the least filled.

Source: SGLang's router and SMG, policy ``cache_aware``, with their defaults. They match against a tree of what was routed;
here the index says what is cached. How filled a worker is goes by the tokens that it had to compute so far, as their trees'
sizes do before anything is evicted.
"""

from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.router.config import RouterConfig
from kvyard.router.inputs import RoutingInput
from kvyard.router.policies import Policy
from kvyard.router.request import Choice


class CacheAware(Policy):
    needs_index = True
    OPTIONS: ClassVar[Options] = {
        "match": Option(0.3, "Share of the prompt that a worker must have to be taken for it."),
        "imbalance": Option(64, "Difference in requests from which on loads count as far apart."),
        "imbalance_ratio": Option(1.5, "Ratio of requests that they must exceed as well."),
    }

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._filled: dict[int, float] = {}
        """Tokens that each worker had to compute so far, by slot."""

    def choose(self, routing: RoutingInput) -> Choice:
        options = self.options
        requests = [worker.requests for worker in routing.workers]
        fewest, most = min(requests), max(requests)
        if most - fewest > options["imbalance"] and most > options["imbalance_ratio"] * fewest:
            return routing.cheapest(lambda worker, _: float(worker.requests), "load")
        longest = routing.longest_matches
        if longest[0].cached_tokens > options["match"] * routing.num_tokens:
            return routing.cheapest(lambda worker, _: float(worker.requests), "match", longest)
        return routing.cheapest(lambda worker, _: self._filled.get(worker.slot, 0.0), "room")

    def routed(self, routing: RoutingInput, choice: Choice) -> None:
        new = routing.match_of(choice.slot).new_tokens
        self._filled[choice.slot] = self._filled.get(choice.slot, 0.0) + new

    def gone(self, slot: int) -> None:
        self._filled.pop(slot, None)
