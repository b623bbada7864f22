"""``kv``: the least cost, by what the index knows and what was routed since."""

from kvyard.router.active import BLOCKS
from kvyard.router.config import RouterConfig
from kvyard.router.cost import cheapest, costs, has_candidates
from kvyard.router.inputs import Choice, RoutingInput
from kvyard.router.policies import Policy


class Kv(Policy):
    needs_index = True
    guarded = True

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self.ranked_by = BLOCKS if has_candidates(config) else 0

    def costs(self, at: RoutingInput) -> list[float]:
        return costs(self.config, at)

    def choose(self, at: RoutingInput) -> Choice:
        return cheapest(self.config, at, "cost")
