"""Whatever an engine answers passes unchanged, and odd endings are told from proper ones."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence

import httpx
import pytest

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.server.gateway.scripted_engine import ScriptedEngine, answer, chunked, connect, gated, plain

from kvyard.server import connection as heads

ODD = [b": hello\r\n\r\n", b"data:  {'not': json}\n", b"\n", b"id: 7\xc3\x28\ndata: x\n\n" * 3, b"data: [DONE]\r\n\r\n"]
SERVER_ERROR = answer("500 Internal Server Error", b'{"error":{"message":"no","type":"x","param":null,"code":500}}')
pytestmark = pytest.mark.zmq


def test_any_bytes_pass() -> None:
    whole = json.dumps({"b": 1, "a": [2]}, indent=3).encode() + b"\n\n"
    packed = gzip.compress(whole)

    def script(head: str, body: bytes) -> Sequence[bytes]:
        if b'"stream"' in body:
            return chunked(*ODD)
        if b"gzip" in body:
            return [answer("200 OK", packed, more="content-encoding: gzip\r\nset-cookie: a=1\r\nset-cookie: b=2\r\n")]
        return [answer("201 Created", whole, kind="application/weird; x=y", more="X-Thing: A b\r\nx-thing: C\r\n")]

    with ScriptedEngine(script) as engine, gated(engine) as gate:
        gate.ready(1)
        with gate.stream("x") as reply:
            assert b"".join(reply.iter_raw()) == b"".join(ODD)
            assert reply.headers["x-odd"] == "Yes" and reply.headers["content-type"] == "text/event-stream"
        found = gate.client.post("/v1/completions", json={"prompt": "y"})
        assert found.status_code == 201 and found.content == whole
        assert found.headers.get_list("x-thing") == ["A b", "C"]
        assert found.headers["content-type"] == "application/weird; x=y"
        found = gate.client.post("/v1/completions", json={"prompt": "gzip"})
        assert found.content == whole and found.num_bytes_downloaded == len(packed)
        assert found.headers.get_list("set-cookie") == ["a=1", "b=2"]
        gate.idle()


def test_the_request_passes_unchanged() -> None:
    with ScriptedEngine(lambda head, body: [answer("200 OK", b"{}")]) as engine, gated(engine) as gate:
        gate.ready(1)
        body = b'{  "prompt":"x" , "unknown": {"deep": [1.0, 1e3]}, "\\u0061": "\\u00e9" }\n'
        headers = {
            "x-custom": "Ü".encode(),
            "authorization": "Bearer secret",
            "connection": "close, x-hop",
            "x-hop": "1",
        }
        gate.client.post("/v1/completions", content=body, headers=headers)
        head, sent = engine.requests[-1]
        assert sent == body
        lines = {line.partition(":")[0].lower(): line.partition(": ")[2] for line in head.split("\r\n")[1:]}
        assert lines["x-custom"].encode("latin-1").decode() == "Ü" and lines["authorization"] == "Bearer secret"
        assert lines["host"] == engine.url.removeprefix("http://")
        assert "x-hop" not in lines and "x-data-parallel-rank" not in lines and lines["x-request-id"]


def test_tokens_are_not_passed_on() -> None:
    with ScriptedEngine(lambda head, body: [answer("200 OK", b"{}")]) as engine:
        with gated(engine, token="ours") as gate:
            gate.ready(1)
            gate.client.post("/v1/completions", json={"prompt": "x"})
            assert "ours" not in engine.requests[-1][0]
            assert httpx.post(f"{gate.url}/v1/completions", json={}, trust_env=False).status_code == 401
        with gated(engine, token="ours", upstream_token="theirs") as gate:
            gate.ready(1)
            gate.client.post("/v1/completions", json={"prompt": "x"})
            assert "Bearer theirs" in engine.requests[-1][0] and "ours" not in engine.requests[-1][0]


def test_a_connection_that_went_stale_is_no_failure() -> None:
    """The only engine hangs up on what it held idle, as servers do: the request is sent again."""
    count = 0

    def script(head: str, body: bytes) -> Sequence[bytes]:
        nonlocal count
        count += 1
        return [] if count % 2 else [answer("200 OK", b"{}")]

    with ScriptedEngine(script) as engine, gated(engine) as gate:
        gate.ready(1)
        for _ in range(4):
            assert gate.client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
        gate.idle()


def test_an_engine_that_hangs_up_before_its_first_byte_is_left() -> None:
    """However it goes: at once, after the head, amid an answer that isn't streamed, with an error as its first event."""
    error = b'data: {"error": {"message": "dying", "type": "x", "param": null, "code": 503}}\n\n'
    fine = [*chunked(b"data: fine\n\n")]
    bad: list[Sequence[bytes]] = [
        [],
        chunked(end=False),
        [answer("200 OK", b"{}" * 50)[:-10]],
        chunked(error, b"data: [DONE]\n\n"),
        [SERVER_ERROR],
        [answer("503 Service Unavailable", b"{}")],
        [answer("429 Too Many Requests", b"{}", more="retry-after: 9\r\n")],
    ]
    which: list[Sequence[bytes]] = [[]]
    with ScriptedEngine(lambda head, body: which[0]) as first, ScriptedEngine(lambda head, body: fine) as second:
        with gated(first, second, router={"policy": "round-robin"}, shun_seconds=0.05) as gate:
            gate.ready(2)
            first.hangs_up = True
            for way in bad:
                which[0] = way
                failures = first.requests[:]
                for _ in range(4):
                    with gate.stream("x") as reply:
                        assert reply.status_code == 200 and b"".join(reply.iter_raw()) == b"data: fine\n\n", way
                assert len(first.requests) > len(failures), way
                gate.ready(2)
            assert gate.gateway.traffic.counters.retried >= len(bad)
            assert gate.gateway.traffic.counters.failed == 0
            gate.idle()


def test_the_last_engines_error_is_passed_on() -> None:
    with ScriptedEngine(lambda head, body: [SERVER_ERROR]) as first, ScriptedEngine(lambda head, body: []) as second:
        with gated(first, second, router={"policy": "round-robin"}) as gate:
            gate.ready(2)
            seen = {gate.client.post("/v1/completions", json={"prompt": "x"}).status_code for _ in range(4)}
            assert seen <= {500, 502} and seen
            reply = gate.client.post("/v1/completions", json={"prompt": "x"})
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
            gate.idle()


def test_an_engine_that_fails_in_the_middle_is_not_tried_again() -> None:
    """The client gets what there was, an error that says so, and an end that can't be taken for a proper one."""
    with (
        ScriptedEngine(lambda head, body: chunked(b"data: a\n\n", b"data: b\n\n", end=False)) as engine,
        gated(engine) as gate,
    ):
        gate.ready(1)
        got = b""
        with pytest.raises(httpx.RemoteProtocolError), gate.stream("x") as reply:
            for part in reply.iter_raw():
                got += part
        assert got.startswith(b"data: a\n\ndata: b\n\ndata: {")
        said = json.loads(got.rpartition(b"data: ")[2])
        assert said["error"]["code"] == 502 and "closed the connection" in said["error"]["message"]
        assert len(engine.requests) == 1
        gate.idle()
        assert gate.gateway.traffic.counters.broken == 1


def test_a_refusal_is_the_engines() -> None:
    body = b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}'
    with ScriptedEngine(lambda head, sent: [answer("400 Bad Request", body)]) as engine, gated(engine) as gate:
        gate.ready(1)
        reply = gate.client.post("/v1/completions", json={"prompt": "x"})
        assert reply.status_code == 400 and reply.content == body and len(engine.requests) == 1


def test_a_silent_engine_is_given_up() -> None:
    with ScriptedEngine(lambda head, body: chunked(b"data: a\n\n", b"data: b\n\n")) as engine:
        engine.pause = 30.0
        with gated(engine, silent_seconds=0.2, retries=0) as gate:
            gate.ready(1)
            reply = gate.client.post("/v1/completions", json={"prompt": "x"})
            assert reply.status_code == 502 and "silent" in reply.json()["error"]["message"]
            gate.idle()


def test_a_large_body_passes() -> None:
    with ScriptedEngine(lambda head, body: [answer("200 OK", b"{}")]) as engine, gated(engine) as gate:
        gate.ready(1)
        body = json.dumps({"prompt": [123456] * 300_000}).encode()
        assert gate.client.post("/v1/completions", content=body).status_code == 200
        assert engine.requests[-1][1] == body
        gate.idle()


def test_a_cut_stream_is_logged_as_a_failure_of_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of ours is logged but that an engine failed; a stream that is cut is no error of the server."""
    script = chunked(b"data: a\n\n", end=False)
    with ScriptedEngine(lambda head, body: script) as engine, gated(engine) as gate:
        gate.ready(1)
        for _ in range(3):
            with pytest.raises(httpx.RemoteProtocolError), gate.stream("x") as reply:
                reply.read()
        gate.idle()
    assert "ASGI" not in caplog.text and "Traceback" not in caplog.text


def test_a_status_that_is_none() -> None:
    with ScriptedEngine(lambda head, body: [answer("999 Odd", b"{}")]) as engine, gated(engine, retries=1) as gate:
        gate.ready(1)
        assert gate.client.post("/v1/completions", json={"prompt": "x"}).status_code == 502
        gate.idle()


def test_a_session_of_an_endless_name_is_not_passed_on() -> None:
    with ScriptedEngine(plain) as engine, gated(engine) as gate:
        gate.ready(1)
        assert gate.client.post("/close_session", json={"session_id": "x" * 65_537}).status_code == 400
        assert not any("close_session" in head for head, _ in engine.requests)


def test_an_engine_that_has_too_much_to_do_is_not_blamed() -> None:
    busy = answer("429 Too Many Requests", b'{"error":{"message":"later"}}', more="retry-after: 7\r\n")
    with (
        ScriptedEngine(lambda head, body: [busy]) as first,
        ScriptedEngine(lambda head, body: [answer("200 OK", b"{}")]) as second,
    ):
        with gated(first, second, router={"policy": "round-robin"}) as gate:
            gate.ready(2)
            for _ in range(12):
                assert gate.client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
            assert gate.engines()["odd0"]["state"] == "ready" and gate.engines()["odd0"]["failed"] == 0
            gate.post("/admin/drain", engine="odd1")
            reply = gate.client.post("/v1/completions", json={"prompt": "x"})
            assert reply.status_code == 429 and reply.headers["retry-after"] == "7"


def test_queries_go_along() -> None:
    with ScriptedEngine(plain) as engine, gated(engine) as gate:
        gate.ready(1)
        gate.post("/v1/completions?api-version=2024%2F10&x=a+b", prompt="x")
        assert engine.requests[-1][0].startswith("POST /v1/completions?api-version=2024%2F10&x=a+b HTTP/1.1")
        gate.complete("x")
        assert engine.requests[-1][0].startswith("POST /v1/completions HTTP/1.1")
        with connect(gate) as connection:
            half = b"y" * (heads.HEADER_BYTES * 2 // 3)  # of an address and of headers together
            connection.sendall(b"GET /ping?%b HTTP/1.1\r\nhost: x\r\nx-long: %b\r\n\r\n" % (half, half))
            assert connection.recv(1000).startswith(b"HTTP/1.1 431")
