"""A tally: where the tokens of routed prompts were, as decisions saw it."""

from __future__ import annotations

from kvyard.events.types import Tier
from kvyard.router import Decision
from kvyard.server.dashboard.view import PromptSources, prompt_sources


class Tally:
    """Tokens, over all time."""

    __slots__ = ("computed", "elsewhere", "tiers")

    def __init__(self) -> None:
        self.tiers = [0] * len(Tier)
        self.elsewhere = self.computed = 0

    def add(self, decision: Decision, block_size: int) -> None:
        """Count one decision."""
        known = decision.overlap * block_size
        elsewhere = decision.regret * block_size
        for at, blocks in enumerate(decision.tiers):
            self.tiers[at] += blocks * block_size
        self.elsewhere += elsewhere
        self.computed += max(0, decision.num_tokens - known - elsewhere)

    def prompts(self) -> PromptSources:
        """As a dashboard has it."""
        return prompt_sources(self.tiers, self.computed, self.elsewhere)
