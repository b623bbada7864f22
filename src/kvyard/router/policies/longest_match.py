"""``longest-match``: who has most of the prompt; load decides only among equals and for prompts that are new to all."""

from kvyard.router.inputs import Choice, RoutingInput, least
from kvyard.router.policies import Policy


class LongestMatch(Policy):
    needs_index = True
    guarded = True

    def choose(self, at: RoutingInput) -> Choice:
        cached = [at.cached(slot) for slot in at.slots]
        most = max(cached)
        holders = [slot for slot, tokens in zip(at.slots, cached) if tokens == most]
        return least(holders, [at.loads.prefill[slot] + at.loads.requests[slot] for slot in holders], at.rng, "match")
