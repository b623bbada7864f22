"""``kv``: the least cost, by what the index knows and what was routed since."""

from kvyard.router.config import RouterConfig
from kvyard.router.cost import BlockCost, block_rank, drawn, is_exact, is_plain
from kvyard.router.inputs import RoutingInput
from kvyard.router.policies import CostModel, Policy
from kvyard.router.request import Choice
from kvyard.router.worker import WorkerLoad


class Kv(Policy):
    needs_index = True
    needs_shared = True
    guarded = True
    draws = True

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self.ranked = not config.temperature
        self._is_plain, self._is_exact = is_plain(config), is_exact(config)

    def costs(self, routing: RoutingInput) -> CostModel:
        return BlockCost(self.config, routing, self._is_plain)

    def rank(self, worker: WorkerLoad) -> tuple[int, float]:
        return block_rank(self.config, worker)

    def choose(self, routing: RoutingInput) -> Choice:
        config, size = self.config, routing.loads.block_size
        costs = BlockCost(config, routing, self._is_plain)
        if config.temperature and len(routing.workers) > 1:
            return drawn(routing, costs, config.temperature)
        exact = self._is_exact and not size & size - 1
        return routing.cheapest(costs.cost, self.why, None, costs.lower_bound if self.ranked else None, exact)
