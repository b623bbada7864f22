"""The gateway's metrics for Prometheus: where requests went and why, how much reuse was promised and how much was had.

What the engines' streams say comes by the names in ``kvyard.index.metrics`` and of the index service, so one dashboard serves
both. Figures that are kept anyway are read by ``state_samples`` at each scrape.
"""

from __future__ import annotations

from pathlib import Path

from kvyard.clock import SECOND
from kvyard.index.metrics import NAMES as INDEX_NAMES
from kvyard.router import Decision
from kvyard.server.gateway.proxied import AnswerTokens, ProxiedRequest
from kvyard.server.metrics import Metrics, read_catalog

P = "kvyard_gateway_"
NAMES: dict[str, str] = read_catalog(Path(__file__).with_name("metrics.toml"))
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
