"""``random``: any worker, by chance."""

from kvyard.router.inputs import Choice, RoutingInput
from kvyard.router.policies import Policy


class Random(Policy):
    needs_keys = False

    def choose(self, routing: RoutingInput) -> Choice:
        workers = routing.workers
        return Choice(workers[routing.rng.randrange(len(workers))].slot, 0.0, len(workers), "random")
