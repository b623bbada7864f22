"""Counters and histograms of the hot path, as plain numbers: what is counted for every request takes no lock and no call chain.

Each is counted on one event loop, and read there. ``Metrics`` shows them with all else.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

C = TypeVar("C", bound="Count | BucketCounts")


class Count:
    """A number that only goes up."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        self.value += amount


class BucketCounts:
    """Number of values at most as large as each bound, and their sum."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds`` go up."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return counts by upper bound, cumulative as in Prometheus."""
        counts: list[tuple[str, float]] = []
        below = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            below += count
            counts.append(("+Inf" if bound == float("inf") else repr(float(bound)), below))
        return counts

    @property
    def sum(self) -> float:
        return self._sum


class ByLabels(dict[tuple[str, ...], C], Generic[C]):
    """A metric's series by the values of their labels; one that isn't there yet begins."""

    def __init__(self, name: str, text: str, labels: Sequence[str], make: Callable[[], C]) -> None:
        super().__init__()
        self._name = name
        self._text = text
        self._labels = labels
        self._make = make

    def __missing__(self, labels: tuple[str, ...]) -> C:
        child = self[labels] = self._make()
        return child

    def family(self) -> Any:
        """For Prometheus."""
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        counts = CounterMetricFamily(self._name.removesuffix("_total"), self._text, labels=self._labels)
        histograms = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for labels, metric in self.items():
            if isinstance(metric, Count):
                counts.add_metric(labels, metric.value)
            else:
                histograms.add_metric(labels, metric.buckets(), metric.sum)
        return counts if self._name.endswith("_total") else histograms
