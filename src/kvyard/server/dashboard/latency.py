"""Latencies of the last minute, for a dashboard."""

from __future__ import annotations

from collections import deque

from kvyard.clock import MS, SECOND
from kvyard.server.dashboard.view import Latency

WINDOW = 60 * SECOND
REMEMBERED = 4096
"""Latencies that are kept at most."""


class LatencyWindow:
    """When something came, and how long it took, in nanoseconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, int]] = deque(maxlen=REMEMBERED)

    def add(self, at: int, took: int) -> None:
        self._seen.append((at, took))

    def latency(self, now: int) -> Latency | None:
        """Percentiles within the window; ``None`` where there is nothing in it."""
        found = sorted(took for at, took in self._seen if at > now - WINDOW)
        if not found:
            return None

        def at(share: float) -> float:
            return found[min(len(found) - 1, int(share * len(found)))] / MS

        return Latency(p50=at(0.5), p90=at(0.9), p99=at(0.99), count=len(found))
