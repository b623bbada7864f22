"""``conductor``: the soonest first token by queue and prefill.

Source: Mooncake's Conductor (FAST 25; RFC Mooncake #977), without its transfers between workers: each computes what it hasn't
cached itself.
"""

from kvyard.router.inputs import Choice, RoutingInput, least
from kvyard.router.policies import Policy


class Conductor(Policy):
    needs_index = True
    needs_pace = True
    guarded = True

    def choose(self, at: RoutingInput) -> Choice:
        return least(at.slots, self.costs(at), at.rng, "time")

    def costs(self, at: RoutingInput) -> list[float]:
        """Milliseconds until the first token."""
        times = []
        for slot in at.slots:
            pace = at.paces[slot]
            times.append(pace.prefill(at.loads.prefill[slot]) + pace.prefill(at.request.num_tokens - at.cached(slot)))
        return times
