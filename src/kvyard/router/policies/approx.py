"""``approx``: the cost of ``kv``, by what was routed alone. For engines that announce nothing."""

from kvyard.clock import from_seconds
from kvyard.router.active import BLOCKS
from kvyard.router.config import RouterConfig
from kvyard.router.cost import cheapest, costs, has_candidates
from kvyard.router.inputs import Choice, RoutingInput
from kvyard.router.memory import RoutedMemory
from kvyard.router.policies import Policy


class Approx(Policy):
    guarded = True

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self.ranked_by = BLOCKS if has_candidates(config) else 0
        ttl = config.approx_ttl_s
        self.memory = RoutedMemory(None if ttl is None else from_seconds(ttl), config.remembered_blocks)

    def costs(self, at: RoutingInput) -> list[float]:
        return costs(self.config, at)

    def choose(self, at: RoutingInput) -> Choice:
        return cheapest(self.config, at, "cost")
