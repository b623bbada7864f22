"""Statistics of a report: means, percentiles and spreads of many values.

A percentile is the value at the nearest rank, so it is always one that occurred: of n values in order, counted from 0, the one
at share x (n - 1), and between two ranks exactly the lower one. So p50 of an even number of values is the lower of the two in
the middle. Values may have weights: a weight of n is n equal values.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of values. All zero if there are none."""

    count: int = 0
    mean: float = 0.0
    min: float = 0.0
    max: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    std: float = 0.0


def spread(values: Sequence[float] | npt.NDArray[np.generic], scale: float = 1.0) -> Spread:
    """Return the spread of ``values``, each divided by ``scale``."""
    data = np.asarray(values, dtype=np.float64)
    return weighted(data, np.ones(len(data), dtype=np.int64), scale)


def weighted(values: npt.NDArray[np.generic], weights: npt.NDArray[np.int64], scale: float = 1.0) -> Spread:
    """Return the distribution of ``values`` of which each ``values[i]`` occurs ``weights[i]`` times."""
    total = int(weights.sum())
    if not total:
        return Spread()
    order = np.argsort(values, kind="stable")
    ranked = np.asarray(values, dtype=np.float64)[order] / scale
    mass = weights[order]
    upto = mass.cumsum()
    mean = float((ranked * mass).sum() / total)
    spare = float((((ranked - mean) ** 2) * mass).sum() / total)

    def at(share: float) -> float:
        return float(ranked[int(np.searchsorted(upto, rank_of(share, total), side="right"))])

    return Spread(
        count=total,
        mean=mean,
        min=float(ranked[0]),
        max=float(ranked[-1]),
        p50=at(0.5),
        p90=at(0.9),
        p95=at(0.95),
        p99=at(0.99),
        std=spare**0.5,
    )


def rank_of(share: float, count: int) -> int:
    """Return the index of the percentile among ``count`` values in order."""
    return math.ceil(share * (count - 1) - 0.5)


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """A ratio that says what it is of."""

    value: float
    part: int
    whole: int
    of: str
    """Numerator and denominator in words."""


def share(part: int, whole: int, of: str) -> Share:
    """Return ``part`` of ``whole``; 0 where the whole is nothing."""
    return Share(value=part / whole if whole else 0.0, part=part, whole=whole, of=of)


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of values by size, in steps of equal ratio. The distribution function is exact at their ends."""

    zeros: int = 0
    """Values below ``SMALLEST``."""
    first: int = 0
    """The number of the first step. Step k ends at 2 ** (k / STEPS), and includes its end."""
    counts: list[int] = msgspec.field(default_factory=list)

    @property
    def ends(self) -> list[float]:
        """Return the bounds of steps: one more than there are counts."""
        if not self.counts:
            return []
        return [2.0 ** ((self.first + step) / STEPS) for step in range(-1, len(self.counts))]


STEPS = 8
"""Steps to a doubling: a step is 9 % wide."""
SMALLEST = 0.001


def histogram(
    values: Sequence[float] | npt.NDArray[np.generic], weights: npt.NDArray[np.int64] | None = None, scale: float = 1.0
) -> Histogram:
    """Return the histogram of ``values``, each divided by ``scale``; ``values[i]`` occurs ``weights[i]`` times, or once."""
    data = np.asarray(values, dtype=np.float64) / scale
    mass = np.ones(len(data), dtype=np.int64) if weights is None else weights
    large = data >= SMALLEST
    zeros = int(mass[~large].sum())
    if not large.any():
        return Histogram(zeros=zeros)
    steps = np.ceil(np.log2(data[large]) * STEPS).astype(np.int64)
    first = int(steps.min())
    counts = np.zeros(int(steps.max()) - first + 1, dtype=np.int64)
    np.add.at(counts, steps - first, mass[large])
    return Histogram(zeros=zeros, first=first, counts=counts.tolist())


def merged(histogram: Histogram, other: Histogram) -> Histogram:
    """Return the histogram of the values of both."""
    zeros = histogram.zeros + other.zeros
    if not histogram.counts or not other.counts:
        more = histogram if histogram.counts else other
        return Histogram(zeros=zeros, first=more.first, counts=more.counts)
    first = min(histogram.first, other.first)
    counts = [0] * (max(part.first + len(part.counts) for part in (histogram, other)) - first)
    for part in (histogram, other):
        for step, count in enumerate(part.counts, part.first - first):
            counts[step] += count
    return Histogram(zeros=zeros, first=first, counts=counts)
