"""``llm-d-blend``: the highest sum of weighted scores: prefix, queue, free cache, and longest without a new prompt.

Source: llm-d's scorers before August 2026, with weights 3, 2, 2, 2. An engine's queue is taken to be its requests without a
first token, and its cache's use what active prompts hold: the router asks no engine. Where the size of a cache isn't known,
all count as equally free.

llm-d itself reads both from engines' metrics, every 50 ms, and an engine's change as its passes end. Between two readings all
prompts go to the same worker (``refresh_ms=50``). Unless engines' events are configured it knows caches by what it routed
(``approximate=1``), and remembers as many blocks as the devices hold (``remembered_blocks``).
"""

from typing import ClassVar, NamedTuple

from kvyard.clock import MS
from kvyard.registry import Option, Options
from kvyard.router.config import RouterConfig
from kvyard.router.inputs import RoutingInput
from kvyard.router.matches import Match
from kvyard.router.memory import RoutedMemory
from kvyard.router.policies import Policy
from kvyard.router.request import Choice
from kvyard.router.search import Cost
from kvyard.router.worker import WorkerLoad

PASS_TOKENS = 8192
"""Prompt tokens that an engine computes in a pass, before its metrics change."""


class Reading(NamedTuple):
    """One worker's metrics, as they were last read."""

    at: int
    queued: int
    blocks: int


class LlmdBlend(Policy):
    needs_index = True
    needs_pace = True
    guarded = True
    OPTIONS: ClassVar[Options] = {
        "prefix": Option(3.0, "Weight of the cached share of the prompt."),
        "queue": Option(2.0, "Weight of a short queue."),
        "cache": Option(2.0, "Weight of free blocks."),
        "no_hit": Option(2.0, "Weight of the time since the worker's last prompt without a hit."),
        "weighted": Option(0, "1: workers are drawn by their scores, instead of the highest.", most=1),
        "refresh_ms": Option(
            0.0, "Milliseconds between two readings of a worker's metrics; 0: the router's own books."
        ),
        "approximate": Option(0, "1: caches are known by what was routed there, not by events.", most=1),
    }

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        if self.options["approximate"]:
            self.needs_index = False
            self.memory = RoutedMemory(None, config.remembered_blocks)
        self._cold: dict[int, int] = {}
        """Slots by when they last got a prompt that no worker had any of, oldest first."""
        self._readings: dict[int, Reading] = {}
        """By slot."""

    def choose(self, routing: RoutingInput) -> Choice:
        weights, workers, tokens = self.options, routing.workers, routing.num_tokens
        readings: dict[int, Reading] = {}
        if weights["refresh_ms"]:
            readings = {worker.slot: self._read(worker, routing.now) for worker in workers}
        queued = [reading.queued for reading in readings.values()] or [worker.queued for worker in workers]
        fewest, longest = min(queued), max(queued)
        turns = self._turns(routing) if _is_cold(routing) else {}

        def cost(worker: WorkerLoad, match: Match) -> float:
            seen: Reading | WorkerLoad = readings[worker.slot] if readings else worker
            queue = (longest - seen.queued) / (longest - fewest) if longest > fewest else 1.0
            capacity = worker.pace.capacity
            free = 1.0 - min(1.0, seen.blocks / capacity) if capacity else 1.0
            return -(
                weights["prefix"] * match.cached_tokens / tokens
                + weights["queue"] * queue
                + weights["cache"] * free
                + weights["no_hit"] * turns.get(worker.slot, 0.5)
            )

        return self._draw(routing, cost) if weights["weighted"] else routing.cheapest(cost, "cost")

    def _draw(self, routing: RoutingInput, cost: Cost) -> Choice:
        """A worker by chance, in proportion to its score, as llm-d's weighted-random-picker has it."""
        scored = [
            (-cost(worker, match), worker.slot) for match in routing.matches for worker in routing.workers_of([match])
        ]
        left = routing.rng.random() * sum([score for score, _ in scored])
        for score, slot in scored:
            left -= score
            if left < 0:
                return Choice(slot, -score, 1, "cost")
        return routing.cheapest(cost, "cost")

    def routed(self, routing: RoutingInput, choice: Choice) -> None:
        if _is_cold(routing):
            self._cold.pop(choice.slot, None)
            self._cold[choice.slot] = routing.now

    def gone(self, slot: int) -> None:
        self._cold.pop(slot, None)
        self._readings.pop(slot, None)

    def _read(self, worker: WorkerLoad, now: int) -> Reading:
        """Return the worker's metrics as they were last read."""
        refresh = self.options["refresh_ms"] * MS
        known = self._readings.get(worker.slot)
        if known is not None:
            in_pass = worker.pace.prefill(min(PASS_TOKENS, worker.prefill_tokens)) * MS
            if now < max(known.at + refresh, worker.computing_since + in_pass):
                return known
        # The prompt that is being computed doesn't wait.
        known = self._readings[worker.slot] = Reading(now, max(0, worker.queued - 1), worker.blocks)
        return known

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
