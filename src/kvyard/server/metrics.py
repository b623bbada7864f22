"""Metrics for Prometheus, for every server here: counters and histograms by a table of names, and samples that are read at
each scrape.
"""

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvyard.errors import KvyardError
from kvyard.index.metrics import Sample
from kvyard.server.counting import BucketCounts, ByLabels, Count


def read_catalog(path: Path) -> dict[str, Any]:
    """Return the TOML file with the names and help texts of metrics."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


class Metrics:
    """A registry of its own, so that two servers in a process don't meet."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        """``texts`` are the help texts of metrics. Raises ``KvyardError`` where prometheus-client isn't installed."""
        try:
            from prometheus_client import CollectorRegistry
        except ImportError:
            raise KvyardError("serving needs prometheus-client: pip install 'kvyard[server]'") from None
        self.registry = CollectorRegistry(auto_describe=False)
        self.sources: list[Callable[[], Iterable[Sample]]] = []
        """Sources that are read at each scrape. Names that end in ``_total`` are counters, all others gauges."""
        self._texts = dict(texts)
        self._counted: list[ByLabels[Any]] = []
        self.registry.register(self)

    def add_texts(self, texts: Mapping[str, str]) -> None:
        """Say what further metrics are, which a source will have."""
        self._texts.update(texts)

    def counts(self, name: str, *labels: str) -> ByLabels[Count]:
        """Return a counter for hot paths, of one event loop."""
        counter = ByLabels(name, self._texts[name], labels, Count)
        self._counted.append(counter)
        return counter

    def bucketed(self, name: str, buckets: Sequence[float], *labels: str) -> ByLabels[BucketCounts]:
        """Return a histogram for hot paths, of one event loop."""
        histogram = ByLabels(name, self._texts[name], labels, partial(BucketCounts, buckets))
        self._counted.append(histogram)
        return histogram

    def counter(self, name: str, *labels: str) -> "MetricChildren":
        from prometheus_client import Counter

        return MetricChildren(Counter(name, self._texts[name], labels, registry=self.registry))

    def histogram(self, name: str, buckets: Sequence[float], *labels: str) -> "MetricChildren":
        from prometheus_client import Histogram

        return MetricChildren(Histogram(name, self._texts[name], labels, buckets=buckets, registry=self.registry))

    def collect(self) -> Iterator[Any]:
        """Yield the sources' samples as families, for the registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        yield from (counted.family() for counted in self._counted)
        families: dict[str, Any] = {}
        for source in self.sources:
            for name, labels, value in source():
                family = families.get(name)
                if family is None:
                    make = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                    family = families[name] = make(name.removesuffix("_total"), self._texts[name], labels=list(labels))
                family.add_metric(list(labels.values()), value)
        yield from families.values()

    def text(self) -> tuple[bytes, str]:
        """Return all metrics in Prometheus' text format, and its media type."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self.registry), CONTENT_TYPE_LATEST


class MetricChildren(dict[tuple[str, ...], Any]):
    """A metric's children by their labels, found with one lookup instead of a lock and a check each time."""

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.metric = metric

    def __missing__(self, labels: tuple[str, ...]) -> Any:
        child = self[labels] = self.metric.labels(*labels)
        return child
