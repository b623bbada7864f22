"""``llm-d-blend``: the highest sum of weighted scores: prefix, queue, free cache, and longest without a new prompt.

Source: llm-d's scorers before August 2026, with weights 3, 2, 2, 2. An engine's queue is taken to be its requests without a
first token, and its cache's use what active prompts hold: the router asks no engine. Where the size of a cache isn't known,
all count as equally free.
"""

from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.router.config import RouterConfig
from kvyard.router.inputs import RoutingInput
from kvyard.router.matches import Match
from kvyard.router.policies import Policy
from kvyard.router.request import Choice
from kvyard.router.worker import WorkerLoad


class LlmdBlend(Policy):
    needs_index = True
    needs_pace = True
    guarded = True
    OPTIONS: ClassVar[Options] = {
        "prefix": Option(3.0, "Weight of the cached share of the prompt."),
        "queue": Option(2.0, "Weight of a short queue."),
        "cache": Option(2.0, "Weight of free blocks."),
        "no_hit": Option(2.0, "Weight of the time since the worker's last prompt without a hit."),
    }

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._cold: dict[int, int] = {}
        """Slots by when they last got a prompt that no worker had any of, oldest first."""

    def choose(self, routing: RoutingInput) -> Choice:
        weights, workers, tokens = self.options, routing.workers, routing.num_tokens
        queued = [worker.queued for worker in workers]
        fewest, longest = min(queued), max(queued)
        turns = self._turns(routing) if _is_cold(routing) else {}

        def cost(worker: WorkerLoad, match: Match) -> float:
            queue = (longest - worker.queued) / (longest - fewest) if longest > fewest else 1.0
            capacity = worker.pace.capacity
            free = 1.0 - min(1.0, worker.blocks / capacity) if capacity else 1.0
            return -(
                weights["prefix"] * match.cached_tokens / tokens
                + weights["queue"] * queue
                + weights["cache"] * free
                + weights["no_hit"] * turns.get(worker.slot, 0.5)
            )

        return routing.cheapest(cost, "cost")

    def routed(self, routing: RoutingInput, choice: Choice) -> None:
        if _is_cold(routing):
            self._cold.pop(choice.slot, None)
            self._cold[choice.slot] = routing.now

    def gone(self, slot: int) -> None:
        self._cold.pop(slot, None)

    def _turns(self, routing: RoutingInput) -> dict[int, float]:
        """By slot, from 1 to 0: those that never got a cold prompt first, then those whose last one is longest ago."""
        slots = [worker.slot for worker in routing.workers]
        order = [slot for slot in slots if slot not in self._cold]
        order += [slot for slot in self._cold if routing.eligible >> slot & 1]
        if len(order) == 1:
            return {}
        return {slot: 1.0 - rank / (len(order) - 1) for rank, slot in enumerate(order)}


def _is_cold(routing: RoutingInput) -> bool:
    """True if no worker has any of the prompt."""
    return not any([match.cached_tokens for match in routing.matches])
