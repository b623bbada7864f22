"""How a trace is driven at a live endpoint. Values only."""

from __future__ import annotations

import math

import msgspec

from kvyard.errors import KvyardError
from kvyard.replay.live.prompts import VOCABULARY


class LiveConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One live run."""

    model: str | None = None
    """What to ask for; left out, the first that the endpoint says it serves."""
    speedup: float = 1.0
    """Divides the gaps between arrivals, and think times."""
    speed: float = 1.0
    """How many times as fast as real the endpoint's time passes: that of a mock engine. Latencies are in its time."""
    concurrency: int | None = None
    """Closed loop: so many sessions (or requests) under way at any time, whatever the recorded times."""
    limit: int | None = None
    """Requests at most."""
    timeout_s: float = 600.0
    """Real seconds that a request may take, from when it was due."""
    seed: int = 0
    """Of the tokens of prompts."""
    vocabulary: int = VOCABULARY
    """Tokens of prompts are below this."""
    exact: bool = True
    """Ask for answers of just the recorded length, with ``ignore_eos`` and ``min_tokens``."""

    def check(self) -> None:
        """Raise ``KvyardError`` for what can't be."""
        for name in ("speedup", "speed", "timeout_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise KvyardError(f"{name} must be a number above 0, got {value}")
        for name in ("concurrency", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise KvyardError(f"{name} must be at least 1, got {value}")
