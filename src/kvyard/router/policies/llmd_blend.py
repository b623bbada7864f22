"""``llm-d-blend``: the highest sum of weighted scores: prefix, queue, free cache, and longest without a new prompt.

Source: llm-d's scorers before August 2026, with weights 3, 2, 2, 2. An engine's queue is taken to be its requests without a
first token, and its cache's use what active prompts hold: the router asks no engine. Where the size of a cache isn't known,
all count as equally free.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from kvyard.router.config import RouterConfig
from kvyard.router.inputs import Choice, RoutingInput, least
from kvyard.router.policies import Policy


class LlmdBlend(Policy):
    needs_index = True
    needs_pace = True
    guarded = True
    OPTIONS: ClassVar[Mapping[str, float]] = {"prefix": 3.0, "queue": 2.0, "cache": 2.0, "no_hit": 2.0}

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._cold: dict[int, int] = {}
        """Slots by when they last got a prompt that no worker had any of, oldest first."""

    def choose(self, at: RoutingInput) -> Choice:
        weigh, slots = self.options, at.slots
        waiting = dict.fromkeys(slots, 0)
        for entry in at.loads.active.values():
            if entry.prefill_tokens and entry.slot in waiting:
                waiting[entry.slot] += 1
        most, fewest = max(waiting.values()), min(waiting.values())
        cold = at.overlaps is None or not any(at.cached(slot) for slot in slots)
        ranks = {slot: rank for rank, slot in enumerate(self._by_last_cold(slots))}
        scores = []
        for slot in slots:
            queue = (most - waiting[slot]) / (most - fewest) if most > fewest else 1.0
            capacity = at.paces[slot].capacity
            free = 1.0 - min(1.0, at.loads.blocks[slot] / capacity) if capacity else 1.0
            turn = 1.0 - ranks[slot] / (len(slots) - 1) if cold and len(slots) > 1 else 0.5
            scores.append(
                weigh["prefix"] * at.cached(slot) / at.request.num_tokens
                + weigh["queue"] * queue
                + weigh["cache"] * free
                + weigh["no_hit"] * turn
            )
        return least(slots, [-score for score in scores], at.rng, "cost")

    def routed(self, at: RoutingInput, choice: Choice) -> None:
        if at.overlaps is None or not any(at.cached(slot) for slot in at.slots):
            self._cold.pop(choice.slot, None)
            self._cold[choice.slot] = at.now

    def gone(self, slot: int) -> None:
        self._cold.pop(slot, None)

    def _by_last_cold(self, slots: Sequence[int]) -> list[int]:
        """Those that never got one first, then those whose last one is longest ago."""
        known = [slot for slot in self._cold if slot in slots]
        return [slot for slot in slots if slot not in self._cold] + known
