"""Summary of many values in little memory: exact while there are at most ``MOST_EXACT``, beyond that by a sketch.

The sketch counts values in steps of equal ratio, so that a percentile is off by at most ``RELATIVE_ERROR`` of itself,
whatever the values are. Count, smallest and largest stay exact, and so do histograms; mean and deviation are off by
rounding alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvyard.replay.report.numbers import Histogram, Spread, histogram, merged, rank_of, spread

MOST_EXACT = 1_000_000
"""Requests of a run up to which its percentiles are exact."""
RELATIVE_ERROR = 0.001
_RATIO = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_STEP = float(np.log(_RATIO))


class PercentileError(msgspec.Struct, frozen=True, kw_only=True):
    """Error bound of a report's percentiles if it has more requests than are kept one by one."""

    relative_error: float = RELATIVE_ERROR
    exact_up_to: int = MOST_EXACT
    """Requests."""


class Values:
    """Values of one kind, each 0 or more; ``add`` them, then ask."""

    def __init__(self, scale: float = 1.0, *, exact: bool = True) -> None:
        """Answers are in units of ``scale``. Unless ``exact``, percentiles are by the sketch."""
        self._scale = scale
        self._exact = exact
        self._lots: list[npt.NDArray[np.float64]] = []
        self._count = 0
        self._zeros = 0
        self._mean = 0.0
        self._spare = 0.0
        """Sum of squared distances from the mean."""
        self._low, self._high = float("inf"), float("-inf")
        self._first = 0
        self._steps: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """Values by steps, from step ``_first`` on; step k holds those above ``_RATIO ** (k - 1)``, up to ``_RATIO ** k``."""
        self._histogram = Histogram()

    def add(self, values: Sequence[float] | npt.NDArray[np.generic]) -> None:
        """Note ``values``."""
        data = np.asarray(values, dtype=np.float64)
        if not len(data):
            return
        if self._exact:
            self._lots.append(data)
            return
        self._histogram = merged(self._histogram, histogram(data, None, self._scale))
        self._note_moments(data)
        large = data[data > 0]
        self._zeros += len(data) - len(large)
        if len(large):
            steps = np.ceil(np.log(large) / _STEP).astype(np.int64)
            low = int(steps.min())
            self._first, self._steps = _added(self._first, self._steps, low, np.bincount(steps - low))

    def spread(self) -> Spread:
        """Return the distribution."""
        if self._exact:
            return spread(self._all(), self._scale)
        if not self._count:
            return Spread()

        def at(share: float) -> float:
            rank = rank_of(share, self._count)
            if rank < self._zeros:
                return 0.0
            step = self._first + int(np.searchsorted(upto, rank - self._zeros, side="right"))
            middle = 2 * _RATIO**step / (_RATIO + 1)
            return min(max(middle, self._low), self._high) / self._scale

        upto = self._steps.cumsum()
        return Spread(
            count=self._count,
            mean=self._mean / self._scale,
            min=self._low / self._scale,
            max=self._high / self._scale,
            p50=at(0.5),
            p90=at(0.9),
            p95=at(0.95),
            p99=at(0.99),
            std=(self._spare / self._count) ** 0.5 / self._scale,
        )

    def histogram(self) -> Histogram:
        """Return the counts by size."""
        return histogram(self._all(), None, self._scale) if self._exact else self._histogram

    def _all(self) -> npt.NDArray[np.float64]:
        if len(self._lots) != 1:
            self._lots = [np.concatenate(self._lots) if self._lots else np.zeros(0)]
        return self._lots[0]

    def _note_moments(self, data: npt.NDArray[np.float64]) -> None:
        count, mean = len(data), float(data.mean())
        spare = float(((data - mean) ** 2).sum())
        whole = self._count + count
        apart = mean - self._mean
        self._spare += spare + apart * apart * self._count * count / whole
        self._mean += apart * count / whole
        self._count = whole
        self._low, self._high = min(self._low, float(data.min())), max(self._high, float(data.max()))


def _added(
    first: int, counts: npt.NDArray[np.int64], more_first: int, more: npt.NDArray[np.int64]
) -> tuple[int, npt.NDArray[np.int64]]:
    """Return two rows of counts, each from a step on, as one."""
    if not len(counts):
        return more_first, more
    low = min(first, more_first)
    high = max(first + len(counts), more_first + len(more))
    sums = np.zeros(high - low, dtype=np.int64)
    sums[first - low : first - low + len(counts)] += counts
    sums[more_first - low : more_first - low + len(more)] += more
    return low, sums
