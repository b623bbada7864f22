"""The new-token ratio: how much of the output that running requests may still produce gets room set aside.

Setting aside all of it would waste most; setting aside none would retract often. So the share starts high and falls with every
decode pass in which nothing had to be retracted; a retraction sets it to what the running ones have shown to need. It is a
function of the number of decode passes, not a running sum, so that many passes at once leave the same ratio.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FIRST = 0.7
LOWEST_SHARE = 0.14
DECAY_PASSES = 600
LOOK_AHEAD = 20
"""Decode steps per request that a new estimate makes room for."""


class NewTokenRatio:
    """The ratio by the number of decode passes so far."""

    def __init__(self, conservativeness: float) -> None:
        first = FIRST * conservativeness
        self._floor = first * LOWEST_SHARE
        self._step = (first - self._floor) / DECAY_PASSES
        self._base = first
        self._since = 0

    def at(self, tick: int) -> float:
        """The ratio when ``tick`` decode passes are over."""
        passes = tick - self._since
        return self._base if passes <= 0 else max(self._floor, self._base - passes * self._step)

    def many(self, tick: int, count: int) -> npt.NDArray[np.float64]:
        """The ratio after each of the next ``count`` decode passes."""
        passes = np.arange(tick + 1, tick + 1 + count) - self._since
        falling = np.maximum(self._floor, self._base - passes * self._step)
        return np.where(passes <= 0, self._base, falling)

    def estimate(self, tick: int, produced: int, wanted: int, requests: int) -> None:
        """A request was retracted in the decode pass ``tick``: start again from what the rest have produced so far, out of the
        ``wanted`` tokens they may produce in all.
        """
        self._base = min(1.0, (produced + LOOK_AHEAD * requests) / (wanted + 1))
        self._since = tick + 1
