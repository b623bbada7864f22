"""``round-robin``: one worker after the other, in the order in which they were added."""

from bisect import bisect_left

from kvyard.router.config import RouterConfig
from kvyard.router.inputs import Choice, RoutingInput
from kvyard.router.policies import Policy


class RoundRobin(Policy):
    needs_keys = False

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._next = 0

    def choose(self, at: RoutingInput) -> Choice:
        # By turn rather than by count, so that one that is left out for a while doesn't shift the others' turns.
        slots = at.slots
        place = bisect_left(slots, self._next)
        return Choice(slots[place if place < len(slots) else 0], 0.0, 1, "turn")

    def routed(self, at: RoutingInput, choice: Choice) -> None:
        self._next = choice.slot + 1
