"""The service's metrics for Prometheus: every figure of every index by the names in ``kvyard.index.metrics``, and its own.

Figures are read when they are asked for, so those of a worker that was unregistered are gone with it.
"""

from collections.abc import Iterator
from pathlib import Path

from kvyard.index.metrics import NAMES, Sample, collect
from kvyard.server.indexer.conditions import conditions
from kvyard.server.indexer.listener import Listener
from kvyard.server.indexer.service import Service
from kvyard.server.metrics import Metrics, read_catalog

OWN: dict[str, str] = read_catalog(Path(__file__).with_name("metrics.toml"))
"""Metrics of the service and their help. ``IndexerMetrics`` brings each of them, and nothing else beside ``NAMES``."""

_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class IndexerMetrics(Metrics):
    """The metrics of one service."""

    def __init__(self, service: Service) -> None:
        super().__init__(OWN | NAMES)
        self._service = service
        self._requests = self.counter("kvyard_indexer_requests_total", "path", "status")
        self._seconds = self.histogram("kvyard_indexer_request_seconds", _BUCKETS, "path")
        self.sources.append(self._samples)

    def seen(self, path: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self._requests[path, str(status)].inc()
        self._seconds[path,].observe(seconds)

    def _samples(self) -> Iterator[Sample]:
        models = self._service.models.values()
        yield "kvyard_indexer_models", {}, len(models)
        yield "kvyard_indexer_task_failures_total", {}, self._service.supervisor.failures
        yield "kvyard_indexer_degraded", {}, any(True for _ in conditions(self._service))
        by_status = dict.fromkeys(("pending", "active", "failed"), 0)
        for model in models:
            common = {"model": model.name, "tenant": model.tenant}
            for name, labels, value in collect(model.indexer):
                yield name, common | labels, value
            for stream, listener in model.listeners.items():
                by_status[listener.status] += 1
                where = common | {"stream": stream}
                yield from stream_samples("kvyard_indexer_", where, listener)
                yield "kvyard_indexer_stream_damaged_batches_total", where, listener.total("damaged")
                malformed = listener.subscriber.counters.malformed
                yield "kvyard_indexer_stream_malformed_messages_total", where, malformed
        for status, count in by_status.items():
            yield "kvyard_indexer_listeners", {"status": status}, count


def stream_samples(prefix: str, labels: dict[str, str], listener: Listener) -> Iterator[Sample]:
    """Yield the metrics of one stream that service and gateway share, each with a prefix of its own."""
    yield f"{prefix}stream_updates_total", labels, listener.applied
    yield f"{prefix}stream_waiting", labels, listener.waiting
    yield f"{prefix}stream_gaps_total", labels, listener.total("gaps")
    yield f"{prefix}stream_missed_batches_total", labels, listener.total("missed")
    yield f"{prefix}stream_restarts_total", labels, listener.total("restarts")
