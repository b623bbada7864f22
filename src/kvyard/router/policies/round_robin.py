"""``round-robin``: one worker after the other, in the order in which they were added."""

from kvyard.router.config import RouterConfig
from kvyard.router.inputs import RoutingInput
from kvyard.router.policies import Policy
from kvyard.router.ranking import lowest
from kvyard.router.request import Choice


class RoundRobin(Policy):
    needs_keys = False

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._next = 0

    def choose(self, routing: RoutingInput) -> Choice:
        # By turn rather than by count, so that a worker that is left out for a while doesn't shift the others' turns.
        due = routing.eligible >> self._next << self._next
        return Choice(lowest(due or routing.eligible), 0.0, 1, "turn")

    def routed(self, routing: RoutingInput, choice: Choice) -> None:
        self._next = choice.slot + 1
