"""The service's metrics for Prometheus: every figure of every index by the names in ``kvyard.index.metrics``, and its own.

Figures are read when they are asked for, so those of a worker that was unregistered are gone with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvyard.errors import KvyardError
from kvyard.index.metrics import NAMES, collect
from kvyard.server.indexer.service import Service

OWN: dict[str, str] = {
    "kvyard_indexer_models": "Pairs of model and tenant.",
    "kvyard_indexer_listeners": "Streams by status: pending, active, failed.",
    "kvyard_indexer_stream_updates_total": "Updates applied.",
    "kvyard_indexer_stream_waiting": "Batches read and not applied yet.",
    "kvyard_indexer_stream_gaps_total": "Gaps seen.",
    "kvyard_indexer_stream_missed_batches_total": "Batches that were missing when a gap was seen.",
    "kvyard_indexer_stream_restarts_total": "Publishers that were replaced.",
    "kvyard_indexer_stream_damaged_batches_total": "Batches that could not be read in full.",
    "kvyard_indexer_stream_malformed_messages_total": "Messages that were no batches.",
    "kvyard_indexer_requests_total": "Requests answered, by path and status.",
    "kvyard_indexer_request_seconds": "How long answers took.",
}
"""What the service adds, and what it says. ``Measures`` brings each of them, and nothing else beside ``NAMES``."""

_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class Measures:
    """One registry of its own, so that two services in a process don't meet."""

    def __init__(self, service: Service) -> None:
        """Raises ``KvyardError`` where prometheus-client isn't installed."""
        try:
            from prometheus_client import CollectorRegistry, Counter, Histogram
        except ImportError:
            raise KvyardError("serving needs prometheus-client: pip install 'kvyard[server]'") from None
        self._service = service
        self.registry = CollectorRegistry(auto_describe=False)
        name = "kvyard_indexer_requests_total"
        self._requests = Counter(name, OWN[name], ["path", "status"], registry=self.registry)
        name = "kvyard_indexer_request_seconds"
        self._seconds = Histogram(name, OWN[name], ["path"], buckets=_BUCKETS, registry=self.registry)
        self.registry.register(self)

    def seen(self, path: str, status: int, seconds: float) -> None:
        """A request was answered."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def text(self) -> tuple[bytes, str]:
        """Everything, and the type of that."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Any]:
        """For the registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}

        def sample(name: str, text: str, labels: dict[str, str], value: float) -> None:
            family = families.get(name)
            if family is None:
                make = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                family = families[name] = make(name.removesuffix("_total"), text, labels=list(labels))
            family.add_metric(list(labels.values()), value)

        service = self._service
        sample("kvyard_indexer_models", OWN["kvyard_indexer_models"], {}, len(service.models))
        by_status = dict.fromkeys(("pending", "active", "failed"), 0)
        for model in service.models.values():
            common = {"model": model.name, "tenant": model.tenant}
            for name, labels, value in collect(model.indexer):
                sample(name, NAMES[name], common | labels, value)
            for stream, listener in model.listeners.items():
                by_status[listener.status] += 1
                counters = [status.counters for status in listener.subscriber.statuses()]
                figures = {
                    "updates_total": listener.applied,
                    "waiting": listener.waiting,
                    "gaps_total": sum(one.gaps for one in counters),
                    "missed_batches_total": sum(one.missed for one in counters),
                    "restarts_total": sum(one.restarts for one in counters),
                    "damaged_batches_total": sum(one.damaged for one in counters),
                    "malformed_messages_total": listener.subscriber.counters.malformed,
                }
                for name, figure in figures.items():
                    full = f"kvyard_indexer_stream_{name}"
                    sample(full, OWN[full], common | {"stream": stream}, figure)
        for status, count in by_status.items():
            sample("kvyard_indexer_listeners", OWN["kvyard_indexer_listeners"], {"status": status}, count)
        yield from families.values()
