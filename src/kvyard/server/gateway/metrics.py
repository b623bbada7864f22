"""The gateway's metrics for Prometheus: where requests went and why, how much reuse was promised and how much was had.

What the engines' streams say comes by the names in ``kvyard.index.metrics`` and of the index service, so one dashboard serves
both. Figures that are kept anyway are read by ``state_samples`` at each scrape.
"""

from __future__ import annotations

from kvyard.clock import SECOND
from kvyard.index.metrics import NAMES as INDEX_NAMES
from kvyard.router import Decision
from kvyard.server.gateway.proxied import AnswerTokens, ProxiedRequest
from kvyard.server.metrics import Metrics

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
    "forgotten_total": "Requests that the router gave up, because their end was never reported.",
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


class GatewayMetrics(Metrics):
    """What happens to requests. The rest is in ``sources``."""

    def __init__(self) -> None:
        super().__init__({P + name: text for name, text in NAMES.items()} | INDEX_NAMES)
        self._requests = self.counter(P + "requests_total", "model", "outcome")
        self._decisions = self.counter(P + "decisions_total", "model", "engine", "why")
        self._prompt = self.counter(P + "prompt_tokens_total", "model")
        self._predicted = self.counter(P + "predicted_cached_tokens_total", "model")
        self._regret = self.counter(P + "regret_tokens_total", "model")
        self._said_prompt = self.counter(P + "reported_prompt_tokens_total", "model")
        self._said_cached = self.counter(P + "reported_cached_tokens_total", "model")
        self._said_predicted = self.counter(P + "reported_predicted_tokens_total", "model")
        self._output = self.counter(P + "output_tokens_total", "model")
        self._retries = self.counter(P + "retries_total", "model")
        self._seconds = self.histogram(P + "request_seconds", _SLOW, "model")
        self._first = self.histogram(P + "time_to_first_byte_seconds", _SLOW, "model")
        self._placing = self.histogram(P + "placing_seconds", _FAST, "model")

    def placed(self, proxied: ProxiedRequest, decision: Decision, now: int) -> None:
        """A request was given to an engine."""
        model = proxied.model
        self._decisions[model, decision.worker.name, decision.why].inc()
        if proxied.tries > 1:
            self._retries[model,].inc()
            return
        size = proxied.block_size
        self._placing[model,].observe((now - proxied.received) / SECOND)
        self._prompt[model,].inc(decision.num_tokens)
        if decision.overlap:
            self._predicted[model,].inc(decision.overlap * size)
        if decision.regret:
            self._regret[model,].inc(decision.regret * size)

    def began_answer(self, proxied: ProxiedRequest) -> None:
        """An engine's first bytes are here."""
        self._first[proxied.model,].observe((proxied.first - proxied.received) / SECOND)

    def answered(self, proxied: ProxiedRequest, decision: Decision, said: AnswerTokens) -> None:
        """An answer is whole."""
        model = proxied.model
        self._output[model,].inc(proxied.output)
        if said.cached is not None and said.prompt is not None:
            self._said_prompt[model,].inc(said.prompt)
            self._said_cached[model,].inc(said.cached)
            self._said_predicted[model,].inc(decision.overlap * proxied.block_size)

    def ended(self, proxied: ProxiedRequest, outcome: str, now: int) -> None:
        """A request is over."""
        self._requests[proxied.model, outcome].inc()
        self._seconds[proxied.model,].observe((now - proxied.received) / SECOND)

    def refused(self) -> None:
        """A request couldn't be routed. Its model's name is any client's invention, so it is no label."""
        self._requests["", "refused"].inc()

    def forget(self, engine: str) -> None:
        """An engine is gone, and so are its series: engines may come and go for ever."""
        for labels in [labels for labels in self._decisions if labels[1] == engine]:
            self._decisions.remove(labels)
