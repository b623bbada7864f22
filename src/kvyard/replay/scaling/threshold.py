"""``threshold``: more workers while something is above its limit, fewer once all of it has been far below for a while.

Limits are the 99th percentile of the time to first token (``ttft_p99``, seconds), waiting requests per worker (``queue``)
and the share of device blocks in use (``kv``); 0 leaves one out. One above its limit by a factor asks for that many times
the workers, but for no more than twice as many, since the queue that it sees was there before. Below ``low`` times every
limit for ``patience`` seconds, one worker goes. The time to first token counts for those that compute prompts, the use of
blocks for those that decode.
"""

from collections.abc import Mapping
from math import ceil
from typing import ClassVar

from kvyard.engine.role import Role
from kvyard.registry import Option, Options
from kvyard.replay.scaling import RoleState, Scaler, Snapshot


class Threshold(Scaler):
    OPTIONS: ClassVar[Options] = {
        "ttft_p99": Option(
            0, "Seconds to the first token, p99 of a period, beyond which a worker is added; 0: not looked at."
        ),
        "queue": Option(0, "Waiting requests per worker beyond which one is added; 0: not looked at."),
        "kv": Option(0.9, "Share of blocks in use beyond which a worker is added; 0: not looked at."),
        "low": Option(0.5, "Share of every limit below which a worker is removed."),
        "patience": Option(60, "Seconds that it stays so before one is removed."),
    }

    def __init__(self, options: Mapping[str, float] | None = None) -> None:
        super().__init__(options)
        self._quiet: dict[Role, float] = {}
        """Since when all was far below its limit, by role."""

    def wanted(self, seen: Snapshot) -> Mapping[Role, int]:
        targets: dict[Role, int] = {}
        for role, state in seen.roles.items():
            loads = self._loads(seen, state)
            there = state.active + state.starting
            high = max(loads, default=0.0)
            if high > 1:
                self._quiet.pop(role, None)
                targets[role] = max(there, ceil(state.active * min(high, 2.0)))
            elif high < self.options["low"]:
                since = self._quiet.setdefault(role, seen.now_s)
                if seen.now_s - since >= self.options["patience"]:
                    targets[role] = there - 1
                    self._quiet[role] = seen.now_s
            else:
                self._quiet.pop(role, None)
        return targets

    def _loads(self, seen: Snapshot, state: RoleState) -> list[float]:
        """Return each figure as a share of its limit."""
        limits, workers = self.options, max(1, state.active)
        loads = []
        ttft = seen.ttft(99)
        if limits["ttft_p99"] and ttft is not None and state.role != "decode":
            loads.append(ttft / 1e3 / limits["ttft_p99"])
        if limits["queue"]:
            loads.append(state.waiting / workers / limits["queue"])
        if limits["kv"] and state.role != "prefill":
            loads.append(state.used / limits["kv"])
        return loads
