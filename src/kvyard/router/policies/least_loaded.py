"""``least-loaded``: the worker that has least to do, by ``RouterConfig.load``."""

from kvyard.router.inputs import Choice, RoutingInput, least
from kvyard.router.policies import Policy, load_of


class LeastLoaded(Policy):
    def choose(self, at: RoutingInput) -> Choice:
        return least(at.slots, load_of(self.config.load, at), at.rng, "load")
