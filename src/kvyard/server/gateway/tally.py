"""A tally: where the tokens of routed prompts were, as decisions saw it."""

from __future__ import annotations

from kvyard.router import Decision
from kvyard.server.dashboard.view import Prompts


class Tally:
    """Tokens, over all time."""

    __slots__ = ("computed", "device", "disk", "elsewhere", "host")

    def __init__(self) -> None:
        self.device = self.host = self.disk = self.elsewhere = self.computed = 0

    def add(self, decision: Decision, block_size: int) -> None:
        """Count one decision."""
        known = decision.overlap * block_size
        elsewhere = decision.regret * block_size
        self.device += decision.device * block_size
        self.host += decision.host * block_size
        self.disk += decision.disk * block_size
        self.elsewhere += elsewhere
        self.computed += max(0, decision.num_tokens - known - elsewhere)

    def prompts(self) -> Prompts:
        """As a dashboard has it."""
        return Prompts(
            device=self.device,
            host=self.host,
            storage=self.disk,
            elsewhere=self.elsewhere,
            computed=self.computed,
        )
