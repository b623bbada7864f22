"""``sticky``: workers that have most of the prompt, until they are saturated; among those that are left, the least to compute.

Source: llm-d's default since August 2026, "sticky until saturated" (prefix-cache-affinity-filter, token-load-scorer).
``affinity`` is the share of the prompt from which a worker counts as warm. Warm workers are left alone once the least of
their backlogs is more than ``peak_tokens_per_s * saturated_s`` tokens beyond the least of the others. llm-d itself knows caches
by what it routed (``approximate=1``) unless engines' events are configured.
"""

from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.router.inputs import RoutingInput
from kvyard.router.matches import Match
from kvyard.router.pace import PEAK_TOKENS_PER_S
from kvyard.router.policies.events_or_memory import EventsOrMemory
from kvyard.router.request import Choice
from kvyard.router.worker import WorkerLoad


class Sticky(EventsOrMemory):
    guarded = True
    OPTIONS: ClassVar[Options] = {
        "affinity": Option(0.8, "Share of the prompt from which on a worker counts as warm."),
        "peak_tokens_per_s": Option(PEAK_TOKENS_PER_S, "Prompt tokens per second that a worker computes."),
        "saturated_s": Option(
            18.0, "Seconds of backlog beyond the least of cold workers at which warm ones are left alone."
        ),
        **EventsOrMemory.OPTIONS,
    }

    def cost(self, worker: WorkerLoad, match: Match) -> float:
        """Return prompt tokens left to compute."""
        return float(worker.prefill_tokens + match.new_tokens)

    def choose(self, routing: RoutingInput) -> Choice:
        enough = self.options["affinity"] * routing.num_tokens
        warm = [match for match in routing.matches if match.cached_tokens >= enough]
        cold = [match for match in routing.matches if match.cached_tokens < enough]
        if warm and cold:
            room = self.options["peak_tokens_per_s"] * self.options["saturated_s"]
            if _least_backlog(routing, warm) - _least_backlog(routing, cold) > room:
                warm = []
        return routing.cheapest(self.cost, "load", warm or routing.matches)


def _least_backlog(routing: RoutingInput, matches: list[Match]) -> int:
    return min([worker.prefill_tokens for worker in routing.workers_of(matches)])
