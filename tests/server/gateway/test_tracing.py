"""Traces, as a collector gets them: real OTLP over HTTP, read with OpenTelemetry's own messages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("opentelemetry.sdk", reason="needs kvyard[otel]")

from tests.server.gateway.scripted_engine import ScriptedEngine, answer, chunked, gated

pytestmark = pytest.mark.zmq

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Spans that were sent to it."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.spans: list[Any] = []
        self.services: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    named = {one.key: one.value.string_value for one in resource.resource.attributes}
                    collector.services.add(named["service.name"])
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def by_trace(self) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for span in sorted(self.spans, key=lambda span: (span.start_time_unix_nano, -span.end_time_unix_nano)):
            found.setdefault(span.trace_id.hex(), []).append(span)
        return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.server.shutdown()
    made.server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_spans_of_a_request(collector: Collector) -> None:
    said = b'{"choices":[],"usage":{"prompt_tokens":30,"completion_tokens":10,"prompt_tokens_details":{"cached_tokens":16}}}'

    def script(head: str, body: bytes) -> Any:
        if b"refuse" in body:
            return [answer("503 Service Unavailable", b"{}")]
        return chunked(b"data: a\n\n", b"data: [DONE]\n\n") if b"stream" in body else [answer("200 OK", said)]

    with ScriptedEngine(script) as engine, gated(engine, traces=collector.url) as gate:
        gate.ready(1)
        given = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"}
        gate.complete("hidden words", headers=given)
        head = engine.requests[-1][0].lower()
        passed = head.partition("traceparent: ")[2].partition("\r\n")[0].split("-")
        assert head.count("traceparent: ") == 1 and "tracestate: a=b" in head
        with gate.stream("x") as reply:
            reply.read()
        gate.complete("refuse", 503)
        gate.idle()
    assert collector.services == {"kvyard-gateway"}
    traces = collector.by_trace()
    assert len(traces) == 3 and TRACE in traces
    root, *parts = traces[TRACE]
    assert root.parent_span_id.hex() == PARENT and root.name == "POST /v1/completions"
    assert passed == ["00", TRACE, root.span_id.hex(), "01"], "the engine's spans hang below ours"
    assert [one.name for one in parts] == ["read", "queue", "decide", "connect", "first byte", "answer"]
    assert all(one.parent_span_id == root.span_id for one in parts)
    assert all(root.start_time_unix_nano <= one.start_time_unix_nano <= one.end_time_unix_nano for one in parts)
    assert parts[-1].end_time_unix_nano <= root.end_time_unix_nano
    told = attributes(root)
    assert told["gen_ai.usage.input_tokens"] == 30 and told["gen_ai.usage.cache_read.input_tokens"] == 16
    assert told["http.response.status_code"] == 200 and told["kvyard.outcome"] == "finished"
    assert attributes(parts[2])["kvyard.policy"] == "least-time"
    _, streamed, failed = (traces[one] for one in traces)
    assert [one.name for one in streamed][-1] == "stream" and not streamed[0].parent_span_id
    assert "failed" in [one.name for one in failed] and failed[0].status.code == 2
    assert "hidden" not in str(collector.spans)


def test_a_collector_that_is_away_costs_no_request() -> None:
    with (
        ScriptedEngine(lambda head, body: [answer("200 OK", b'{"choices":[]}')]) as engine,
        gated(engine, traces="http://127.0.0.1:9") as gate,
    ):
        gate.ready(1)
        assert gate.complete("x").status_code == 200
