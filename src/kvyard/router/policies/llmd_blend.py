"""``llm-d-blend``: the highest sum of weighted scores: prefix, queue, free cache, and longest without a new prompt.

Source: llm-d's scorers before August 2026, with weights 3, 2, 2, 2. An engine's queue is taken to be its requests without a
first token, and its cache's use what active prompts hold: the router asks no engine. Where the size of a cache isn't known,
all count as equally free.

llm-d itself reads both from engines' metrics, every 50 ms (``refresh_ms=50``). An engine takes in new requests before a pass
and updates its metrics after it, so a request is seen when the pass after the one during which it came has ended. Until then
all prompts go to the same worker. What was routed counts as cached at once (its ``speculativeIndexing``), hybrid model or
not. Unless engines' events are configured it knows caches by what it routed alone (``approximate=1``), and remembers as many
blocks as the devices hold (``remembered_blocks``).

A cached block counts by its tier (``host_credit`` and so on; llm-d's ``kvCacheBackendConfigs`` have 0.8 for host memory). Of no
worth means unknown to the router.
"""

from typing import ClassVar, NamedTuple

from kvyard.clock import MS
from kvyard.registry import Option, Options
from kvyard.router.config import RouterConfig
from kvyard.router.inputs import RoutingInput
from kvyard.router.matches import Match
from kvyard.router.policies.events_or_memory import EventsOrMemory
from kvyard.router.request import Choice
from kvyard.router.search import Cost
from kvyard.router.worker import WorkerLoad

PASS_TOKENS = 8192
"""Prompt tokens that an engine computes in a pass, before its metrics change."""


class MetricsReading(NamedTuple):
    """One worker's metrics."""

    queued: int
    blocks: int


class MetricsPage(NamedTuple):
    """One worker's metrics as they were last read, and those that follow."""

    seen: MetricsReading
    following: MetricsReading
    """Metrics at the beginning of the pass that is computed."""
    due: int
    """Time from which ``following`` can be read."""


class LlmdBlend(EventsOrMemory):
    needs_pace = True
    guarded = True
    predicts_plainly = True
    OPTIONS: ClassVar[Options] = {
        "prefix": Option(3.0, "Weight of the cached share of the prompt."),
        "queue": Option(2.0, "Weight of a short queue."),
        "cache": Option(2.0, "Weight of free blocks."),
        "no_hit": Option(2.0, "Weight of the time since the worker's last prompt without a hit."),
        "weighted": Option(0, "1: workers are drawn by their scores, instead of the highest.", most=1),
        "refresh_ms": Option(
            0.0, "Milliseconds between two readings of a worker's metrics; 0: the router's own books."
        ),
        **EventsOrMemory.OPTIONS,
    }

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._cold: dict[int, int] = {}
        """Slots by when they last got a prompt that no worker had any of, oldest first."""
        self._pages: dict[int, MetricsPage] = {}
        """By slot."""

    def choose(self, routing: RoutingInput) -> Choice:
        weights, workers, tokens = self.options, routing.workers, routing.num_tokens
        readings: dict[int, MetricsReading] = {}
        if weights["refresh_ms"]:
            readings = {worker.slot: self._read(worker, routing.now) for worker in workers}
        queued = [reading.queued for reading in readings.values()] or [worker.queued for worker in workers]
        fewest, longest = min(queued), max(queued)
        turns = self._turns(routing) if self._is_cold(routing) else {}

        def cost(worker: WorkerLoad, match: Match) -> float:
            seen: MetricsReading | WorkerLoad = readings[worker.slot] if readings else worker
            queue = (longest - seen.queued) / (longest - fewest) if longest > fewest else 1.0
            capacity = worker.pace.capacity
            free = 1.0 - min(1.0, seen.blocks / capacity) if capacity else 1.0
            return -(
                weights["prefix"] * self._worth(match, routing.loads.block_size) / tokens
                + weights["queue"] * queue
                + weights["cache"] * free
                + weights["no_hit"] * turns.get(worker.slot, 0.5)
            )

        return self._draw(routing, cost) if weights["weighted"] else routing.cheapest(cost, "cost")

    def _draw(self, routing: RoutingInput, cost: Cost) -> Choice:
        """Return a worker by chance, in proportion to its score, as llm-d's weighted-random-picker has it."""
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
        if self._is_cold(routing):
            self._cold.pop(choice.slot, None)
            self._cold[choice.slot] = routing.now

    def gone(self, slot: int) -> None:
        self._cold.pop(slot, None)
        self._pages.pop(slot, None)

    def _read(self, worker: WorkerLoad, now: int) -> MetricsReading:
        """Return the worker's metrics as they were last read."""
        # The prompt that is being computed doesn't wait.
        current = MetricsReading(max(0, worker.queued - 1), worker.blocks)
        page = self._pages.get(worker.slot)
        if page is not None and now < page.due:
            return page.seen
        in_pass = worker.pace.prefill(min(PASS_TOKENS, worker.prefill_tokens))
        seen = current if page is None else page.following
        due = now + round(max(self.options["refresh_ms"], in_pass) * MS)
        self._pages[worker.slot] = MetricsPage(seen, current, due)
        return seen

    def _turns(self, routing: RoutingInput) -> dict[int, float]:
        """By slot, from 1 to 0: those that never got a cold prompt first, then those whose last one is longest ago."""
        slots = [worker.slot for worker in routing.workers]
        order = [slot for slot in slots if slot not in self._cold]
        order += [slot for slot in self._cold if routing.eligible >> slot & 1]
        if len(order) == 1:
            return {}
        return {slot: 1.0 - rank / (len(order) - 1) for rank, slot in enumerate(order)}

    def _is_cold(self, routing: RoutingInput) -> bool:
        """True if no worker has any of the prompt that counts."""
        size = routing.loads.block_size
        return not any([self._worth(match, size) for match in routing.matches])

    def _worth(self, match: Match, block_size: int) -> float:
        """Return the cached tokens, those of lower tiers by their credits."""
        tokens: float = match.cached_tokens
        if tokens and len(match.tiers) > 1:
            for blocks, credit in zip(match.tiers[1:], self.config.lower_credits, strict=False):
                tokens -= match.confidence * (1 - credit) * blocks * block_size
        return tokens
