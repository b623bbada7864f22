"""``predictive``: enough workers for the load that is offered when a worker started now would be ready.

Offered prompt and output tokens per second are followed by a level and a trend (Holt's two smoothings, ``level`` and
``trend`` their weights), and carried ``startup`` ahead. A worker's part is what its own timing says: prompt tokens that
caches don't have, at the speed of a full pass, and decode steps of 32 requests together. ``busy`` is the share of its
time that may be used. Going down, the need must have been lower for ``patience`` seconds.
"""

from collections.abc import Mapping
from math import ceil
from typing import ClassVar

from kvyard.engine.role import Role
from kvyard.registry import Option, Options
from kvyard.replay.scaling import RoleState, Scaler, Snapshot

BATCH = 32
"""Requests that a worker decodes together where it is used well."""


class Predictive(Scaler):
    OPTIONS: ClassVar[Options] = {
        "busy": Option(0.6, "Share of its time that a worker should compute."),
        "level": Option(0.3, "Weight of the latest period in the level of load."),
        "trend": Option(0.1, "Weight of the latest period in its trend."),
        "patience": Option(60, "Seconds that fewer workers suffice before one is removed."),
    }

    def __init__(self, options: Mapping[str, float] | None = None) -> None:
        super().__init__(options)
        self._rates: dict[str, tuple[float, float]] = {}
        """Level and trend, per second, by name."""
        self._lower: dict[Role, tuple[float, int]] = {}
        """Since when fewer would do, and the most that would have been needed since."""

    def wanted(self, seen: Snapshot) -> Mapping[Role, int]:
        hits = seen.cached_tokens / seen.admitted_tokens if seen.admitted_tokens else 0.0
        ahead = seen.startup_s + seen.period_s
        prompts = self._follow("input", seen.input_tokens / seen.period_s, seen.period_s, ahead) * (1 - hits)
        answers = self._follow("output", seen.output_tokens / seen.period_s, seen.period_s, ahead)
        return {
            role: self._settle(role, seen, self._need(state, prompts, answers)) for role, state in seen.roles.items()
        }

    def _follow(self, name: str, rate: float, period: float, ahead: float) -> float:
        """Take in what was offered, and say what will be, ``ahead`` seconds from now."""
        if name not in self._rates:
            self._rates[name] = (rate, 0.0)
        level, trend = self._rates[name]
        weight, slope = self.options["level"], self.options["trend"]
        fresh = weight * rate + (1 - weight) * (level + trend * period)
        trend = slope * (fresh - level) / period + (1 - slope) * trend
        self._rates[name] = (fresh, trend)
        return max(0.0, fresh + trend * ahead)

    def _need(self, state: RoleState, prompts: float, answers: float) -> int:
        """Return the workers for these prompt and output tokens per second."""
        pace, busy = state.pace, max(0.05, self.options["busy"])
        tokens = 4096
        prefill_s = pace.prefill(tokens) / tokens / 1e3
        batch = max(1, min(state.slots, BATCH))
        context = batch * 2048
        step_s = pace.step(batch, context) / batch / 1e3
        seconds = 0.0
        if state.role != "decode":
            seconds += prompts * prefill_s
        if state.role != "prefill":
            seconds += answers * step_s
        return max(1, ceil(seconds / busy))

    def _settle(self, role: Role, seen: Snapshot, need: int) -> int:
        state = seen.roles[role]
        there = state.active + state.starting
        if need >= there:
            self._lower.pop(role, None)
            return need
        since, most = self._lower.get(role, (seen.now_s, 0))
        most = max(most, need)
        if seen.now_s - since < self.options["patience"]:
            self._lower[role] = (since, most)
            return there
        self._lower.pop(role, None)
        return most
