"""``kv``: the least cost, by what the index knows and what was routed since."""

from kvyard.router.cost import cheapest, costs
from kvyard.router.inputs import Choice, RoutingInput
from kvyard.router.policies import Policy


class Kv(Policy):
    needs_index = True
    guarded = True

    def costs(self, at: RoutingInput) -> list[float]:
        return costs(self.config, at)

    def choose(self, at: RoutingInput) -> Choice:
        return cheapest(self.config, at, "cost")
