"""``sticky``: workers that have most of the prompt, until they are saturated; among those that are left, the least to compute.

Source: llm-d's default since August 2026, "sticky until saturated" (prefix-cache-affinity-filter, token-load-scorer).
``affinity`` is the share of the prompt from which a worker counts as warm. Warm workers are left alone once the least of
their backlogs is more than ``peak_tokens_per_s * saturated_s`` tokens beyond the least of the others.
"""

from collections.abc import Mapping
from typing import ClassVar

from kvyard.router.inputs import Choice, RoutingInput, least
from kvyard.router.pace import PEAK_TOKENS_PER_S
from kvyard.router.policies import Policy


class Sticky(Policy):
    needs_index = True
    guarded = True
    OPTIONS: ClassVar[Mapping[str, float]] = {
        "affinity": 0.8,
        "peak_tokens_per_s": PEAK_TOKENS_PER_S,
        "saturated_s": 18.0,
    }

    def costs(self, at: RoutingInput) -> list[float]:
        """Prompt tokens left to compute."""
        return [float(at.work(slot)) for slot in at.slots]

    def choose(self, at: RoutingInput) -> Choice:
        enough = self.options["affinity"] * at.request.num_tokens
        warm = [slot for slot in at.slots if at.cached(slot) >= enough]
        if warm and len(warm) < len(at.slots):
            backlog = at.loads.prefill
            others = min(backlog[slot] for slot in at.slots if slot not in warm)
            room = self.options["peak_tokens_per_s"] * self.options["saturated_s"]
            if min(backlog[slot] for slot in warm) - others > room:
                warm = []
        slots = warm or at.slots
        return least(slots, [float(at.work(slot)) for slot in slots], at.rng, "load")
