"""Driving of a trace at a live endpoint. Values only."""

import math

from kvyard.errors import KvyardError
from kvyard.replay.config import DrivingConfig
from kvyard.replay.live.prompts import VOCABULARY


class LiveConfig(DrivingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One live run. ``seed`` is that of the tokens of prompts."""

    model: str | None = None
    """Model to request; by default the first that the endpoint reports."""
    speed: float = 1.0
    """Factor by which the endpoint's time passes faster than real time: that of a mock engine. Latencies are in its time."""
    timeout_s: float = 600.0
    """Real seconds that a request may take, from when it was due."""
    vocabulary: int = VOCABULARY
    """Tokens of prompts are below this."""
    exact: bool = True
    """Ask for answers of just the recorded length, with ``ignore_eos`` and ``min_tokens``."""

    def check(self) -> None:
        """Raise ``KvyardError`` for what can't be."""
        super().check()
        for name in ("speed", "timeout_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise KvyardError(f"{name} must be a number above 0, got {value}")
