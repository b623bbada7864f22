"""``ray-prefix``: while queues are even, the best match, or who was sent least; else the shorter queue of two.

Source: Ray Serve's PrefixCacheAffinityRouter, with its defaults: queues count as even up to a difference of 10 requests;
below, a match of 10 % is good enough. It matches the text that it sent; here the index says what is cached.
"""

from collections.abc import Mapping
from typing import ClassVar

from kvyard.router.config import RouterConfig
from kvyard.router.inputs import Choice, RoutingInput, least
from kvyard.router.policies import Policy


class RayPrefix(Policy):
    needs_index = True
    OPTIONS: ClassVar[Mapping[str, float]] = {"imbalance": 10, "match": 0.1}

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._sent: dict[int, int] = {}

    def choose(self, at: RoutingInput) -> Choice:
        requests, slots = at.loads.requests, at.slots
        loads = [requests[slot] for slot in slots]
        if max(loads) - min(loads) > self.options["imbalance"]:
            two = at.rng.sample(list(slots), min(2, len(slots)))
            return least(two, [float(requests[slot]) for slot in two], at.rng, "load")
        cached = [at.cached(slot) for slot in slots]
        most = max(cached)
        if most >= self.options["match"] * at.request.num_tokens:
            holders = [slot for slot, tokens in zip(slots, cached) if tokens == most]
            return least(holders, [float(requests[slot]) for slot in holders], at.rng, "match")
        return least(slots, [float(self._sent.get(slot, 0)) for slot in slots], at.rng, "room")

    def routed(self, at: RoutingInput, choice: Choice) -> None:
        new = at.request.num_tokens - at.cached(choice.slot)
        self._sent[choice.slot] = self._sent.get(choice.slot, 0) + new

    def gone(self, slot: int) -> None:
        self._sent.pop(slot, None)
