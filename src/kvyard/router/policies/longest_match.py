"""``longest-match``: who has most of the prompt; load decides only among equals and for prompts that are new to all."""

from kvyard.router.active import BOTH
from kvyard.router.inputs import Choice, RoutingInput, least, least_of
from kvyard.router.policies import Policy
from kvyard.router.ranking import most


class LongestMatch(Policy):
    needs_index = True
    guarded = True
    ranked_by = BOTH

    def choose(self, at: RoutingInput) -> Choice:
        if at.sparse:
            assert at.loads.ranking is not None
            best = most(at.prefixes.levels, at.among)[1] if at.prefixes is not None else 0
            _, load, slots = at.loads.ranking.least(best or at.among)
            return least_of(slots, int(load), at.rng, "match")
        cached = [at.cached(slot) for slot in at.slots]
        longest = max(cached)
        holders = [slot for slot, tokens in zip(at.slots, cached) if tokens == longest]
        return least(holders, [at.loads.prefill[slot] + at.loads.requests[slot] for slot in holders], at.rng, "match")
