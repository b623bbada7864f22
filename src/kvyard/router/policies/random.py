"""``random``: a random worker."""

from kvyard.router.inputs import RoutingInput
from kvyard.router.policies import Policy
from kvyard.router.request import Choice


class Random(Policy):
    needs_keys = False

    def choose(self, routing: RoutingInput) -> Choice:
        workers = routing.workers
        return Choice(workers[routing.rng.randrange(len(workers))].slot, 0.0, len(workers), "random")
