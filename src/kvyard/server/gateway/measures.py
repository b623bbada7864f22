"""The gateway's metrics for Prometheus: where requests went and why, how much reuse was promised and how much was had.

What the engines' streams say comes by the names in ``kvyard.index.metrics`` and of the index service, so one dashboard serves
both. Figures that somebody keeps anyway are read when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvyard.clock import SECOND
from kvyard.errors import KvyardError
from kvyard.router import Decision
from kvyard.server.gateway.usage import Usage

if TYPE_CHECKING:
    from kvyard.server.gateway.exchange import Exchange
    from kvyard.server.gateway.gateway import Gateway

P = "kvyard_gateway_"
NAMES: dict[str, str] = {
    "requests_total": "Requests by model (none where it can't be told) and how they ended: finished, refused, failed, broken, "
    "cancelled.",
    "request_seconds": "From a request's arrival to its end, by model.",
    "time_to_first_byte_seconds": "From a request's arrival to the first byte of its answer, by model.",
    "placing_seconds": "From a request's arrival until an engine was chosen: reading, hashing, routing, waiting.",
    "decisions_total": "Decisions by model, engine and reason.",
    "prompt_tokens_total": "Tokens of prompts that were routed, by model.",
    "predicted_cached_tokens_total": "Of those, what the chosen engine was thought to have.",
    "regret_tokens_total": "What the best engine had more of than the chosen one.",
    "reported_prompt_tokens_total": "Tokens of prompts of which the engine said how many were cached.",
    "reported_cached_tokens_total": "Of those, how many were.",
    "reported_predicted_tokens_total": "Of those, how many had been predicted.",
    "output_tokens_total": "Tokens of answers; streamed events where an engine doesn't say.",
    "retries_total": "Requests sent to another engine because one failed.",
    "unread_prompts_total": "Prompts that could not be read, and were routed by load.",
    "under_way": "Requests under way.",
    "queued": "Requests that wait, by model.",
    "queue_refused_total": "Requests that the queue had no room for, by model.",
    "queue_expired_total": "Requests that waited too long, by model.",
    "forgotten_total": "Requests that the router gave up, because nobody reported their end.",
    "engine_up": "1 where an engine may get requests.",
    "engine_draining": "1 where an engine drains.",
    "engine_requests": "Requests under way at an engine.",
    "engine_failures_total": "Requests that an engine failed.",
    "engine_downs_total": "Times that an engine went down.",
    "index_failures_total": "Questions that a remote index did not answer.",
    "share_connected": "1 where other gateways of the pool are heard.",
    "share_peers": "Other gateways of the pool.",
    "share_foreign_requests": "Requests of other gateways that count here.",
    "share_outages_total": "Times that the server for sharing went away.",
    "share_unknown_workers_total": "Requests of other gateways at workers that aren't known here.",
    "recording": "1 while traffic is recorded.",
    "recorded_requests_total": "Requests written to the recording.",
    "recorded_bytes_total": "Bytes written to it.",
    "unrecorded_requests_total": "Requests left out of it: without a token, or open for too long.",
    "stream_state": "Event streams: 0 fresh, 1 catching up, 2 stale.",
    "stream_gaps_total": "Gaps seen.",
    "stream_missed_batches_total": "Batches that were missing when a gap was seen.",
    "stream_restarts_total": "Publishers that were replaced.",
    "stream_updates_total": "Updates applied.",
    "stream_waiting": "Batches read and not applied yet.",
}
"""What there is beside the index's own, without the prefix."""

_FAST = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 10.0, 60.0)
_SLOW = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)


class Measures:
    """One registry of its own, so that two gateways in a process don't meet."""

    def __init__(self) -> None:
        """Raises ``KvyardError`` where prometheus-client isn't installed."""
        try:
            from prometheus_client import CollectorRegistry, Counter, Histogram
        except ImportError:
            raise KvyardError("serving needs prometheus-client: pip install 'kvyard[server]'") from None
        self.gateway: Gateway | None = None
        self.registry = CollectorRegistry(auto_describe=False)

        def counter(name: str, *labels: str) -> Any:
            return Counter(P + name, NAMES[name], labels, registry=self.registry)

        def histogram(name: str, buckets: tuple[float, ...]) -> Any:
            return Histogram(P + name, NAMES[name], ["model"], buckets=buckets, registry=self.registry)

        self._requests = _Children(counter("requests_total", "model", "outcome"))
        self._decisions = _Children(counter("decisions_total", "model", "engine", "why"))
        self._prompt = _Children(counter("prompt_tokens_total", "model"))
        self._predicted = _Children(counter("predicted_cached_tokens_total", "model"))
        self._regret = _Children(counter("regret_tokens_total", "model"))
        self._said_prompt = _Children(counter("reported_prompt_tokens_total", "model"))
        self._said_cached = _Children(counter("reported_cached_tokens_total", "model"))
        self._said_predicted = _Children(counter("reported_predicted_tokens_total", "model"))
        self._output = _Children(counter("output_tokens_total", "model"))
        self._retries = _Children(counter("retries_total", "model"))
        self._seconds = _Children(histogram("request_seconds", _SLOW))
        self._first = _Children(histogram("time_to_first_byte_seconds", _SLOW))
        self._placing = _Children(histogram("placing_seconds", _FAST))
        self.registry.register(self)

    # -- what happens -------------------------------------------------------------------------------------------------

    def placed(self, exchange: Exchange, decision: Decision) -> None:
        """A request was given to an engine."""
        model = exchange.name
        self._decisions[model, decision.worker.name, decision.why].inc()
        if exchange.tries > 1:
            self._retries[model,].inc()
            return
        size = exchange.pool.block_size
        self._placing[model,].observe(exchange.seconds)
        self._prompt[model,].inc(decision.num_tokens)
        if decision.overlap:
            self._predicted[model,].inc(decision.overlap * size)
        if decision.regret:
            self._regret[model,].inc(decision.regret * size)

    def first_bytes(self, exchange: Exchange) -> None:
        """An answer has begun."""
        self._first[exchange.name,].observe((exchange.first - exchange.received) / SECOND)

    def answered(self, exchange: Exchange, decision: Decision, said: Usage) -> None:
        """An answer is whole."""
        model = exchange.name
        self._output[model,].inc(exchange.output)
        if said.cached is not None and said.prompt is not None:
            self._said_prompt[model,].inc(said.prompt)
            self._said_cached[model,].inc(said.cached)
            self._said_predicted[model,].inc(decision.overlap * exchange.pool.block_size)

    def ended(self, exchange: Exchange, outcome: str) -> None:
        """A request is over."""
        self._requests[exchange.name, outcome].inc()
        self._seconds[exchange.name,].observe(exchange.seconds)

    def refused(self) -> None:
        """A request couldn't be routed. Its model's name is anybody's invention, so it is no label."""
        self._requests["", "refused"].inc()

    def forget(self, engine: str) -> None:
        """An engine is gone, and so are its series; engines may come and go for ever."""
        for labels in [labels for labels in self._decisions if labels[1] == engine]:
            self._decisions.remove(labels)

    # -- what is read when it is asked for ------------------------------------------------------------------------------

    def text(self) -> tuple[bytes, str]:
        """Everything, and the type of that."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Any]:
        """For the registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        from kvyard.index.metrics import NAMES as INDEX_NAMES
        from kvyard.index.metrics import collect

        gateway = self.gateway
        if gateway is None:
            return
        families: dict[str, Any] = {}

        def sample(name: str, value: float, text: str = "", **labels: str) -> None:
            text = text or NAMES[name.removeprefix(P)]
            family = families.get(name)
            if family is None:
                make = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                family = families[name] = make(name.removesuffix("_total"), text, labels=list(labels))
            family.add_metric(list(labels.values()), value)

        sample(P + "under_way", gateway.counters.under_way)
        for model, pool in gateway.pools.items():
            sample(P + "queued", pool.queued, model=model)
            sample(P + "queue_refused_total", pool.refused, model=model)
            sample(P + "queue_expired_total", pool.expired, model=model)
            sample(P + "forgotten_total", pool.router.forgotten, model=model)
            sample(P + "unread_prompts_total", pool.prompting.unread, model=model)
            if pool.remote is not None:
                sample(P + "index_failures_total", pool.remote.failures, model=model)
            if pool.sharing is not None:
                sharing, peers = pool.sharing, pool.sharing.peers
                sample(P + "share_connected", float(sharing.connected), model=model)
                sample(P + "share_peers", len(peers), model=model)
                sample(P + "share_foreign_requests", sum(peers.values()), model=model)
                sample(P + "share_outages_total", sharing.counters.outages, model=model)
                sample(P + "share_unknown_workers_total", sharing.counters.unknown_workers, model=model)
        if gateway.recorder is not None:
            written = gateway.recorder.counters
            sample(P + "recording", float(not gateway.recorder.stopped))
            sample(P + "recorded_requests_total", written.rows)
            sample(P + "recorded_bytes_total", written.bytes)
            sample(P + "unrecorded_requests_total", written.left_out + written.late)
        for name, engine in gateway.engines.items():
            model = "" if engine.pool is None else engine.pool.model
            sample(P + "engine_up", float(engine.up), model=model, engine=name)
            sample(P + "engine_draining", float(engine.draining), model=model, engine=name)
            sample(P + "engine_requests", engine.in_flight, model=model, engine=name)
            sample(P + "engine_failures_total", engine.failed, model=model, engine=name)
            sample(P + "engine_downs_total", engine.downs, model=model, engine=name)
        order = ("fresh", "catching up", "stale")
        for known in gateway.index.models.values():
            for name, labels, value in collect(known.indexer):
                sample(name, value, INDEX_NAMES[name], model=known.name, tenant=known.tenant, **labels)
            for stream, listener in known.listeners.items():
                counters = [status.counters for status in listener.subscriber.statuses()]
                where = {"model": known.name, "stream": stream}
                sample(P + "stream_state", order.index(listener.info().state), **where)
                sample(P + "stream_gaps_total", sum(one.gaps for one in counters), **where)
                sample(P + "stream_missed_batches_total", sum(one.missed for one in counters), **where)
                sample(P + "stream_restarts_total", sum(one.restarts for one in counters), **where)
                sample(P + "stream_updates_total", listener.applied, **where)
                sample(P + "stream_waiting", listener.waiting, **where)
        yield from families.values()


class _Children(dict[tuple[str, ...], Any]):
    """A metric's children by their labels, found with one look instead of a lock and a check each time."""

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self._metric = metric

    def __missing__(self, labels: tuple[str, ...]) -> Any:
        found = self[labels] = self._metric.labels(*labels)
        return found

    def remove(self, labels: tuple[str, ...]) -> None:
        """Forget one."""
        del self[labels]
        self._metric.remove(*labels)
