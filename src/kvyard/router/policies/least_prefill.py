"""``least-prefill``: the least prompt tokens left to compute, this request's included; then the fewest requests, then by turn.

Source: "LPWL", least prefill work left, of gahow's agentic-kvc analysis (2026); it has no figures to set.
"""

from kvyard.index.bits import bits, mask_of
from kvyard.router.config import RouterConfig
from kvyard.router.inputs import RoutingInput
from kvyard.router.matches import Match
from kvyard.router.policies import Policy
from kvyard.router.ranking import lowest
from kvyard.router.request import Choice
from kvyard.router.worker import WorkerLoad


class LeastPrefill(Policy):
    needs_index = True
    guarded = True

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._next = 0

    def cost(self, worker: WorkerLoad, match: Match) -> float:
        """Return prompt tokens left to compute."""
        return float(worker.prefill_tokens + match.new_tokens)

    def choose(self, routing: RoutingInput) -> Choice:
        tokens, slots = routing.least(self.cost)
        workers = routing.loads.workers
        fewest = min([workers[slot].requests for slot in bits(slots)])
        slots = mask_of([slot for slot in bits(slots) if workers[slot].requests == fewest])
        due = slots >> self._next << self._next
        return Choice(lowest(due or slots), tokens, slots.bit_count(), "load")

    def routed(self, routing: RoutingInput, choice: Choice) -> None:
        self._next = choice.slot + 1
