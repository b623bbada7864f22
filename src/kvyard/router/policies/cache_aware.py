"""``cache-aware``: the least loaded while loads are far apart; else the best match, if it is a good one; else the least filled.

Source: SGLang's router and SMG, policy ``cache_aware``, with their defaults. They match against a tree of what was routed;
here the index says what is cached. How filled a worker is goes by the tokens that it had to compute so far, as their trees'
sizes do before anything is evicted.
"""

from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.router.active import REQUESTS, ActiveLoads
from kvyard.router.config import RouterConfig
from kvyard.router.inputs import Choice, RoutingInput, least, least_of
from kvyard.router.policies import Policy
from kvyard.router.ranking import most
from kvyard.router.tally import Tally


class CacheAware(Policy):
    needs_index = True
    ranked_by = REQUESTS
    OPTIONS: ClassVar[Options] = {
        "match": Option(0.3, "Share of the prompt that a worker must have to be taken for it."),
        "imbalance": Option(64, "Difference in requests from which on loads count as far apart."),
        "imbalance_ratio": Option(1.5, "Ratio of requests that they must exceed as well."),
    }

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._filled = Tally()

    def choose(self, at: RoutingInput) -> Choice:
        if at.sparse:
            return self._candidate(at)
        slots, requests, options = at.slots, at.loads.requests, self.options
        loads = [float(requests[slot]) for slot in slots]
        if self._far_apart(min(loads), max(loads)):
            return least(slots, loads, at.rng, "load")
        cached = [at.cached(slot) for slot in slots]
        best = max(cached)
        if best > options["match"] * at.request.num_tokens:
            holders = [slot for slot, tokens in zip(slots, cached) if tokens == best]
            return least(holders, [float(requests[slot]) for slot in holders], at.rng, "match")
        return least(slots, [self._filled.of(slot) for slot in slots], at.rng, "room")

    def _candidate(self, at: RoutingInput) -> Choice:
        """The same, by workers in order of requests, and of what fills them."""
        ranking = at.loads.ranking
        assert ranking is not None
        counts = ranking.counted(at.among)
        fewest, idlest = counts[0]
        if self._far_apart(fewest, counts[-1][0]):
            return least_of(idlest, fewest, at.rng, "load")
        blocks, holders = most(at.prefixes.levels, at.among) if at.prefixes is not None else (0, 0)
        if holders and at.tokens_of(blocks) > self.options["match"] * at.request.num_tokens:
            _, requests, found = ranking.least(holders)
            return least_of(found, requests, at.rng, "match")
        filled, found = self._filled.least(at.among)
        return least_of(found, filled, at.rng, "room")

    def _far_apart(self, fewest: float, most_requests: float) -> bool:
        options = self.options
        return most_requests - fewest > options["imbalance"] and most_requests > options["imbalance_ratio"] * fewest

    def routed(self, at: RoutingInput, choice: Choice) -> None:
        self._filled.add(choice.slot, at.request.num_tokens - at.cached(choice.slot))

    def rank(self, loads: ActiveLoads) -> None:
        self._filled.rank(len(loads.prefill))

    def gone(self, slot: int) -> None:
        self._filled.forget(slot)
