"""``cache-aware``: the least loaded while loads are far apart; else the best match, if it is a good one; else the least filled.

Source: SGLang's router and SMG, policy ``cache_aware``, with their defaults. They match against a tree of what was routed;
here the index says what is cached. How filled a worker is goes by the tokens that it had to compute so far, as their trees'
sizes do before anything is evicted.
"""

from collections.abc import Mapping
from typing import ClassVar

from kvyard.router.config import RouterConfig
from kvyard.router.inputs import Choice, RoutingInput, least
from kvyard.router.policies import Policy


class CacheAware(Policy):
    needs_index = True
    OPTIONS: ClassVar[Mapping[str, float]] = {"match": 0.3, "imbalance": 64, "imbalance_ratio": 1.5}

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._filled: dict[int, int] = {}

    def choose(self, at: RoutingInput) -> Choice:
        slots, requests, options = at.slots, at.loads.requests, self.options
        loads = [float(requests[slot]) for slot in slots]
        if max(loads) - min(loads) > options["imbalance"] and max(loads) > options["imbalance_ratio"] * min(loads):
            return least(slots, loads, at.rng, "load")
        cached = [at.cached(slot) for slot in slots]
        most = max(cached)
        if most > options["match"] * at.request.num_tokens:
            holders = [slot for slot, tokens in zip(slots, cached) if tokens == most]
            return least(holders, [float(requests[slot]) for slot in holders], at.rng, "match")
        return least(slots, [float(self._filled.get(slot, 0)) for slot in slots], at.rng, "room")

    def routed(self, at: RoutingInput, choice: Choice) -> None:
        new = at.request.num_tokens - at.cached(choice.slot)
        self._filled[choice.slot] = self._filled.get(choice.slot, 0) + new

    def gone(self, slot: int) -> None:
        self._filled.pop(slot, None)
