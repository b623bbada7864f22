"""``sticky``: workers that have most of the prompt, until they are saturated; among those that are left, the least to compute.

Source: llm-d's default since August 2026, "sticky until saturated" (prefix-cache-affinity-filter, token-load-scorer).
``affinity`` is the share of the prompt from which a worker counts as warm. Warm workers are left alone once the least of
their backlogs is more than ``peak_tokens_per_s * saturated_s`` tokens beyond the least of the others.
"""

from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.router.active import TOKENS
from kvyard.router.inputs import Choice, RoutingInput, least, least_of
from kvyard.router.pace import PEAK_TOKENS_PER_S
from kvyard.router.policies import Policy
from kvyard.router.ranking import classes


class Sticky(Policy):
    needs_index = True
    guarded = True
    ranked_by = TOKENS
    OPTIONS: ClassVar[Options] = {
        "affinity": Option(0.8, "Share of the prompt from which on a worker counts as warm."),
        "peak_tokens_per_s": Option(PEAK_TOKENS_PER_S, "Prompt tokens per second that a worker computes."),
        "saturated_s": Option(
            18.0, "Seconds of backlog beyond the least of cold workers at which warm ones are left alone."
        ),
    }

    def costs(self, at: RoutingInput) -> list[float]:
        """Prompt tokens left to compute."""
        return [float(at.work(slot)) for slot in at.slots]

    def choose(self, at: RoutingInput) -> Choice:
        if at.sparse:
            return self._candidate(at)
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

    def _candidate(self, at: RoutingInput) -> Choice:
        """The same, by the shortest backlog of those that have equally much of the prompt."""
        ranking, tokens = at.loads.ranking, at.request.num_tokens
        assert ranking is not None
        enough = self.options["affinity"] * tokens
        parts: list[tuple[int, int]] = [(0, at.among)]  # tokens that needn't be computed, and who has them
        if at.prefixes is not None:
            parts = [(at.tokens_of(blocks), slots) for blocks, slots in classes(at.prefixes.levels, at.among)]
        warm = [part for part in parts if part[0] >= enough]
        if warm and len(warm) < len(parts):
            here, there = 0, 0
            for cached, slots in parts:
                if cached >= enough:
                    here |= slots
                else:
                    there |= slots
            room = self.options["peak_tokens_per_s"] * self.options["saturated_s"]
            if ranking.least(here)[1] - ranking.least(there)[1] > room:
                warm = []
        best, found = 0, 0
        for cached, slots in warm or parts:
            _, backlog, idlest = ranking.least(slots)
            work = int(backlog) + tokens - cached
            if not found or work < best:
                best, found = work, idlest
            elif work == best:
                found |= idlest
        return least_of(found, float(best), at.rng, "load")
