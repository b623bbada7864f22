"""``least-loaded``: the worker that has least to do, by ``RouterConfig.load``."""

from kvyard.router.active import BLOCKS, REQUESTS, TOKENS
from kvyard.router.config import RouterConfig
from kvyard.router.inputs import Choice, RoutingInput, least, least_of
from kvyard.router.policies import Policy, load_of


class LeastLoaded(Policy):
    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self.ranked_by = {"requests": REQUESTS, "tokens": TOKENS, "blocks": BLOCKS}[config.load]

    def choose(self, at: RoutingInput) -> Choice:
        if at.sparse:
            assert at.loads.ranking is not None
            _, figure, slots = at.loads.ranking.least(at.among)
            load = figure / at.loads.block_size if self.ranked_by == BLOCKS else int(figure)
            return least_of(slots, load, at.rng, "load")
        return least(at.slots, load_of(self.config.load, at), at.rng, "load")
