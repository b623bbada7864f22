"""``conductor``: the soonest first token by queue, transfer and prefill.

Source: Mooncake's Conductor (FAST 25, algorithm 1; RFC Mooncake #977). Where workers may pull from each other, one that lacks
what the best one has is counted with a transfer of that and the prefill of the rest, if the best has more than ``balancing``
times as much; so a prefix that many ask for gets a second copy. Where they may not, each computes what it hasn't cached.
"""

from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.router.active import TOKENS
from kvyard.router.inputs import Choice, RoutingInput, least, least_of
from kvyard.router.pace import ModelPace, Pace
from kvyard.router.policies import Policy
from kvyard.router.ranking import classes, most


class Conductor(Policy):
    needs_index = True
    needs_pace = True
    guarded = True
    ranked_by = TOKENS
    OPTIONS: ClassVar[Options] = {
        "balancing": Option(1.0, "Times as much of the prompt as this worker that the best must have for a transfer."),
    }

    def choose(self, at: RoutingInput) -> Choice:
        if at.sparse:
            return self._candidate(at)
        return least(at.slots, self.costs(at), at.rng, "time")

    def costs(self, at: RoutingInput) -> list[float]:
        """Milliseconds until the first token."""
        times = []
        best = max([at.cached(slot) for slot in at.slots]) if self.pull_ms is not None else 0
        for slot in at.slots:
            pace = at.paces[slot]
            took = self._own(pace, at.request.num_tokens, at.cached(slot), best)
            times.append(pace.prefill(at.loads.prefill[slot]) + took)
        return times

    def _own(self, pace: Pace, tokens: int, cached: int, best: int) -> float:
        """Milliseconds of the prompt itself where ``cached`` tokens are there and another worker has ``best``."""
        pull_ms = self.pull_ms
        if pull_ms is not None and best > self.options["balancing"] * cached:
            transfer = pull_ms(best - cached)
            if transfer is not None:
                return transfer + pace.prefill(tokens - best)
        return pace.prefill(tokens - cached)

    def _candidate(self, at: RoutingInput) -> Choice:
        """The same, by the fewest tokens that wait at any of those that have equally much and are equally fast."""
        ranking, tokens = at.loads.ranking, at.request.num_tokens
        assert ranking is not None
        levels = at.prefixes.levels if at.prefixes is not None else []
        best = at.tokens_of(most(levels, at.among)[0]) if at.prefixes is not None and self.pull_ms is not None else 0
        low, found = 0.0, 0
        for pace, members in at.speeds:
            rises = not isinstance(pace, ModelPace) or pace.rises
            for blocks, left in classes(levels, at.among & members):
                took = self._own(pace, tokens, at.tokens_of(blocks) if at.prefixes is not None else 0, best)
                while left:
                    _, waiting, slots = ranking.least(left)
                    cost = pace.prefill(int(waiting)) + took
                    if not found or cost < low:
                        low, found = cost, slots
                    elif cost == low:
                        found |= slots
                    elif rises:
                        break
                    left ^= slots  # those with more before them may take as long, or less where times don't rise
        return least_of(found, low, at.rng, "time")
