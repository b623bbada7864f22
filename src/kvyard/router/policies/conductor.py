"""``conductor``: the soonest first token by queue, transfer and prefill.

Source: Mooncake's Conductor (FAST 25, algorithm 1; RFC Mooncake #977). Where workers may pull from each other, one that lacks
what the best one has is counted with a transfer of that and the prefill of the rest, if the best has more than ``balancing``
times as much; so a prefix that many ask for gets a second copy. Where they may not, each computes what it hasn't cached.
"""

from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.router.inputs import RoutingInput
from kvyard.router.matches import Match
from kvyard.router.policies import CostModel, Policy
from kvyard.router.worker import WorkerLoad


class Conductor(Policy):
    needs_index = True
    needs_pace = True
    guarded = True
    why = "time"
    OPTIONS: ClassVar[Options] = {
        "balancing": Option(1.0, "Times as much of the prompt as this worker that the best must have for a transfer."),
    }
    _most_cached = 0
    """Tokens that the worker has which has most."""

    def costs(self, routing: RoutingInput) -> CostModel:
        self._most_cached = routing.longest_matches[0].cached_tokens
        return self

    def cost(self, worker: WorkerLoad, match: Match) -> float:
        """Return milliseconds until the first token."""
        return worker.pace.prefill(worker.prefill_tokens) + self._own(worker, match)

    def _own(self, worker: WorkerLoad, match: Match) -> float:
        """Return milliseconds of the prompt itself: its prefill, or a transfer and the prefill of the rest."""
        pull_ms, most, cached = self.pull_ms, self._most_cached, match.cached_tokens
        if pull_ms is not None and most > self.options["balancing"] * cached:
            transfer = pull_ms(most - cached)
            if transfer is not None:
                return transfer + worker.pace.prefill(match.new_tokens + cached - most)
        return worker.pace.prefill(match.new_tokens)
