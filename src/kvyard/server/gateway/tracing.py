"""Traces for OpenTelemetry: a span for each request and one for each of its parts, sent to a collector by OTLP over HTTP.

Parts are written down as two times each, and made into spans when the request is over; a gateway without traces does none of
it. The engine gets the W3C context of the request's span, so that its own spans hang below it. Nothing of a request's text is
in any span.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from kvyard.errors import KvyardError
from kvyard.router import Decision

CONTEXT = (b"traceparent", b"tracestate")
"""Headers by which traces go on from one server to the next."""
SEND_SECONDS = 2.0
"""Seconds that a collector may take, at the end of the gateway too."""
Attributes = Mapping[str, str | int | float | bool]


class RequestPart(msgspec.Struct, frozen=True):
    """Part of a request's life between two times, in nanoseconds since 1970."""

    name: str
    start: int
    end: int
    error: str = ""
    attributes: Attributes = {}


class RequestTrace:
    """One request's span, while it is open."""

    def __init__(self, tracer: Any, span: Any) -> None:
        self._tracer = tracer
        self._span = span
        self._parts: list[RequestPart] = []
        self._queued = 0

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the context, for the engine."""
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, set_span_in_context(self._span))
        return [(name.encode(), value.encode()) for name, value in carrier.items()]

    def part(self, name: str, start: int, end: int, error: str = "", engine: str = "") -> None:
        """Add a span that ended; ``engine`` is where it ran."""
        self._parts.append(RequestPart(name, start, end, error, {"kvyard.engine": engine} if engine else {}))

    def queued(self, now: int) -> None:
        """Note that the request waits for an engine from now on."""
        self._queued = now

    def decided(self, start: int, end: int, decision: Decision) -> None:
        """Add the span of a routing decision."""
        self.part("queue", self._queued or start, start)
        attributes: Attributes = {
            "kvyard.worker": str(decision.worker),
            "kvyard.policy": decision.policy,
            "kvyard.why": decision.why,
            "kvyard.hit_blocks": decision.overlap,
            "kvyard.prompt_blocks": decision.blocks,
        }
        self._parts.append(RequestPart("decide", start, end, attributes=attributes))

    def end(self, now: int, status: int, outcome: str, attributes: Attributes) -> None:
        """End the request's span."""
        from opentelemetry.trace import StatusCode, set_span_in_context

        within = set_span_in_context(self._span)
        for part in self._parts:
            span = self._tracer.start_span(part.name, within, start_time=part.start, attributes=part.attributes)
            if part.error:
                span.set_status(StatusCode.ERROR, part.error)
            span.end(part.end)
        self._span.set_attributes({"http.response.status_code": status, "kvyard.outcome": outcome, **attributes})
        if outcome in ("failed", "broken") or status >= 500:
            self._span.set_status(StatusCode.ERROR, outcome)
        self._span.end(now)


class Tracing:
    """Traces of one gateway."""

    def __init__(self, provider: Any) -> None:
        """``provider`` is the SDK's."""
        self._provider = provider
        self._tracer = provider.get_tracer("kvyard.gateway")

    @classmethod
    def to(cls, url: str) -> "Tracing":
        """Return tracing to the collector at ``url``, as OTLP over HTTP. Raises ``KvyardError`` if the SDK isn't installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError:
            raise KvyardError("traces need OpenTelemetry's SDK: pip install 'kvyard[otel]'") from None
        except ImportError:
            raise KvyardError(
                "another package, such as xds-protos, has overwritten OpenTelemetry's messages: "
                "pip install --force-reinstall --no-deps opentelemetry-proto"
            ) from None
        from kvyard import __version__

        # What OTEL_RESOURCE_ATTRIBUTES, OTEL_SERVICE_NAME and OTEL_TRACES_SAMPLER say counts more.
        named = Resource({"service.name": "kvyard-gateway", "service.version": __version__})
        provider = TracerProvider(resource=named.merge(Resource.create()) if _service_is_named() else named)
        endpoint = url if url.rstrip("/").endswith("/v1/traces") else f"{url.rstrip('/')}/v1/traces"
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=SEND_SECONDS)))
        return cls(provider)

    def begin(self, method: str, path: str, headers: Mapping[str, str], received: int) -> RequestTrace:
        """Return the trace of a request that came: the one that its headers name, or a new one."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        given = {name: value for name in ("traceparent", "tracestate") if (value := headers.get(name)) is not None}
        span = self._tracer.start_span(
            f"{method} {path}",
            TraceContextTextMapPropagator().extract(given),
            SpanKind.SERVER,
            {"http.request.method": method, "url.path": path},
            start_time=received,
        )
        return RequestTrace(self._tracer, span)

    def close(self) -> None:
        """Send what is left. Waits for it, so not on an event loop."""
        self._provider.shutdown()


def _service_is_named() -> bool:
    import os

    return "OTEL_SERVICE_NAME" in os.environ or "OTEL_RESOURCE_ATTRIBUTES" in os.environ
