"""``longest-match``: the worker with the longest cached prefix; load decides only among equals and for new prompts."""

from kvyard.router.inputs import RoutingInput
from kvyard.router.policies import Policy
from kvyard.router.request import Choice


class LongestMatch(Policy):
    needs_index = True
    guarded = True

    def choose(self, routing: RoutingInput) -> Choice:
        return routing.cheapest(
            lambda worker, _: worker.prefill_tokens + worker.requests, "match", routing.longest_matches
        )
