"""``random``: any worker, by chance."""

from kvyard.router.inputs import Choice, RoutingInput
from kvyard.router.policies import Policy


class Random(Policy):
    needs_keys = False

    def choose(self, at: RoutingInput) -> Choice:
        return Choice(at.slots[at.rng.randrange(len(at.slots))], 0.0, len(at.slots), "random")
