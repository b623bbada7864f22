"""``least-prefill``: the least prompt tokens left to compute, this request's included; then the fewest requests, then by turn.

Source: "LPWL", least prefill work left, of gahow's agentic-kvc analysis (2026); it has no figures to set.
"""

from kvyard.router.config import RouterConfig
from kvyard.router.inputs import Choice, RoutingInput
from kvyard.router.policies import Policy


class LeastPrefill(Policy):
    needs_index = True
    guarded = True

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._next = 0

    def choose(self, at: RoutingInput) -> Choice:
        ranked = [(at.work(slot), at.loads.requests[slot], slot < self._next, slot) for slot in at.slots]
        best = min(ranked)
        tied = sum(one[:2] == best[:2] for one in ranked)
        return Choice(best[3], float(best[0]), tied, "load")

    def costs(self, at: RoutingInput) -> list[float]:
        """Prompt tokens left to compute."""
        return [float(at.work(slot)) for slot in at.slots]

    def routed(self, at: RoutingInput, choice: Choice) -> None:
        self._next = choice.slot + 1
