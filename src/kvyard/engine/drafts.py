"""Drafts: how many speculative tokens a step gets accepted. Seeded per request, so that order of scheduling changes nothing."""

from __future__ import annotations

from random import Random

from kvyard.engine.config import SpeculativeConfig


class Drafts:
    """Draws acceptance by conditional rates: a draft counts only if all before it were accepted."""

    def __init__(self, config: SpeculativeConfig, seed: int) -> None:
        self.length = config.num_speculative_tokens
        self._rates = config.acceptance_rates[: self.length]
        self._seed = seed
        self._draws: dict[str, Random] = {}

    def accepted(self, request_id: str, limit: int) -> int:
        """How many of ``limit`` drafts the next step of this request gets accepted."""
        draw = self._draws.get(request_id)
        if draw is None:
            draw = self._draws[request_id] = Random(f"{self._seed}:{request_id}")
        count = 0
        for rate in self._rates[:limit]:
            if draw.random() >= rate:
                break
            count += 1
        return count

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._draws.pop(request_id, None)
