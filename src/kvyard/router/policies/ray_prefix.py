"""``ray-prefix``: while queues are even, the best match, or who was sent least; else the shorter queue of two.

Source: Ray Serve's PrefixCacheAffinityRouter, with its defaults: queues count as even up to a difference of 10 requests;
below, a match of 10 % is good enough. It matches the text that it sent; here the index says what is cached.
"""

from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.router.active import REQUESTS, ActiveLoads
from kvyard.router.config import RouterConfig
from kvyard.router.inputs import Choice, RoutingInput, least, least_of
from kvyard.router.policies import Policy
from kvyard.router.ranking import most
from kvyard.router.tally import Tally


class RayPrefix(Policy):
    needs_index = True
    ranked_by = REQUESTS
    OPTIONS: ClassVar[Options] = {
        "imbalance": Option(10, "Difference in requests up to which queues count as even."),
        "match": Option(0.1, "Share of the prompt that a worker must have to be taken for it."),
    }

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._sent = Tally()

    def choose(self, at: RoutingInput) -> Choice:
        if at.sparse:
            return self._candidate(at)
        requests, slots = at.loads.requests, at.slots
        loads = [requests[slot] for slot in slots]
        if max(loads) - min(loads) > self.options["imbalance"]:
            return self._of_two(at)
        cached = [at.cached(slot) for slot in slots]
        best = max(cached)
        if best >= self.options["match"] * at.request.num_tokens:
            holders = [slot for slot, tokens in zip(slots, cached) if tokens == best]
            return least(holders, [float(requests[slot]) for slot in holders], at.rng, "match")
        return least(slots, [self._sent.of(slot) for slot in slots], at.rng, "room")

    def _candidate(self, at: RoutingInput) -> Choice:
        """The same, by workers in order of requests, and of what they were sent."""
        ranking = at.loads.ranking
        assert ranking is not None
        counts = ranking.counted(at.among)
        if counts[-1][0] - counts[0][0] > self.options["imbalance"]:
            return self._of_two(at)
        blocks, holders = most(at.prefixes.levels, at.among) if at.prefixes is not None else (0, 0)
        if at.tokens_of(blocks) >= self.options["match"] * at.request.num_tokens:
            _, requests, found = ranking.least(holders or at.among)  # without a holder all have nothing
            return least_of(found, requests, at.rng, "match")
        sent, found = self._sent.least(at.among)
        return least_of(found, sent, at.rng, "room")

    def _of_two(self, at: RoutingInput) -> Choice:
        two = at.rng.sample(at.slots, min(2, len(at.slots)))
        return least(two, [float(at.loads.requests[slot]) for slot in two], at.rng, "load")

    def routed(self, at: RoutingInput, choice: Choice) -> None:
        self._sent.add(choice.slot, at.request.num_tokens - at.cached(choice.slot))

    def rank(self, loads: ActiveLoads) -> None:
        self._sent.rank(len(loads.prefill))

    def gone(self, slot: int) -> None:
        self._sent.forget(slot)
