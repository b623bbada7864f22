"""``conductor``: the soonest first token by queue, transfer and prefill.

Source: Mooncake's Conductor (FAST 25, algorithm 1; RFC Mooncake #977). Where workers may pull from each other, one that lacks
what the best one has is counted with a transfer of that and the prefill of the rest, if the best has more than ``balancing``
times as much; so a prefix that many ask for gets a second copy. Where they may not, each computes what it hasn't cached.
"""

from collections.abc import Mapping
from typing import ClassVar

from kvyard.router.inputs import Choice, RoutingInput, least
from kvyard.router.policies import Policy


class Conductor(Policy):
    needs_index = True
    needs_pace = True
    guarded = True
    OPTIONS: ClassVar[Mapping[str, float]] = {"balancing": 1.0}

    def choose(self, at: RoutingInput) -> Choice:
        return least(at.slots, self.costs(at), at.rng, "time")

    def costs(self, at: RoutingInput) -> list[float]:
        """Milliseconds until the first token."""
        tokens, pull_ms, times = at.request.num_tokens, self.pull_ms, []
        best = max([at.cached(slot) for slot in at.slots]) if pull_ms is not None else 0
        for slot in at.slots:
            pace, cached = at.paces[slot], at.cached(slot)
            took = pace.prefill(tokens - cached)
            if pull_ms is not None and best > self.options["balancing"] * cached:
                transfer = pull_ms(best - cached)
                if transfer is not None:
                    took = transfer + pace.prefill(tokens - best)
            times.append(pace.prefill(at.loads.prefill[slot]) + took)
        return times
