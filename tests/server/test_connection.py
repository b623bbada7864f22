"""Clients that send half a head, read nothing, or ask for another protocol."""

from __future__ import annotations

import socket
import threading

import pytest

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.server.gateway import support
from tests.server.gateway.scripted_engine import ScriptedEngine, answer, chunked, connect, gated, plain
from tests.server.gateway.support import eventually

from kvyard.server import connection as connections

pytestmark = pytest.mark.zmq


def closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_who_sends_no_head_and_who_sends_half_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 1.0)
    with ScriptedEngine(plain) as engine, gated(engine) as gate:
        gate.ready(1)
        with connect(gate) as silent, connect(gate) as slow, connect(gate) as second:
            slow.sendall(b"GET /ping HTTP/1.1\r\nhost: localhost\r\nx-slow: ")
            second.sendall(b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert second.recv(1000).startswith(b"HTTP/1.1 200")
            second.sendall(b"GET /ping HT")
            assert closed(silent) and closed(slow) and closed(second)
        assert gate.complete("x").status_code == 200


def test_an_empty_line_behind_a_body_is_no_head_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        ScriptedEngine(lambda head, body: chunked(b"data: 1\n\n", b"data: 2\n\n")) as engine,
        gated(engine) as gate,
        connect(gate) as connection,
    ):
        gate.ready(1)
        engine.pause = 0.15
        body = b'{"prompt": "x"}'
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        reading = connection.makefile("rb")
        while not (line := reading.readline()).startswith(b"data: 1"):
            assert line
        monkeypatch.setattr(connections, "HEAD_SECONDS", 0.02)
        connection.sendall(b"\r\n")
        assert b"".join(reading.readline() for _ in range(7)).endswith(b"data: 2\n\n\r\n0\r\n")
        reading.close()


def test_a_connection_without_a_request_is_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    going = threading.Event()
    monkeypatch.setattr(support, "KEEP_ALIVE_SECONDS", 0.3)

    def waits(head: str, body: bytes) -> list[bytes]:
        going.wait()
        return [answer("200 OK", b"{}")]

    with ScriptedEngine(waits) as engine, gated(engine) as gate:
        gate.ready(1)
        with connect(gate) as idle, connect(gate) as busy, connect(gate) as unsent:
            unsent.sendall(b"GET /ping HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\nhalf")
            assert unsent.recv(1000).startswith(b"HTTP/1.1 200")
            body = b'{"prompt": "x"}'
            busy.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )
            idle.sendall(b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert idle.recv(1000).startswith(b"HTTP/1.1 200")
            assert closed(idle) and closed(unsent)
            going.set()
            assert busy.recv(1000).startswith(b"HTTP/1.1 200")
            assert closed(busy)


def test_a_body_that_does_not_come_before_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(support, "DRAIN_SECONDS", 0.05)
    with ScriptedEngine(plain) as engine:
        with gated(engine) as gate:
            gate.ready(1)
            connection = connect(gate)
            head = (
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n"
            )
            connection.sendall(head)
            assert connection.recv(1000).startswith(b"HTTP/1.1 100")
        with connection:
            assert connection.recv(1000).startswith(b"HTTP/1.1 503")
    assert "Exception in ASGI application" not in caplog.text


def test_who_reads_nothing_gives_the_engine_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STUCK_SECONDS", 0.3)
    much = chunked(*[b"data: " + b"x" * 100_000 + b"\n\n"] * 400)
    with (
        ScriptedEngine(lambda head, body: much if b"much" in body else plain(head, body)) as engine,
        gated(engine) as gate,
    ):
        gate.ready(1)
        with connect(gate) as stuck:
            body = b'{"prompt": "much"}'
            stuck.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )
            eventually(lambda: gate.gateway.traffic.counters.cancelled == 1)
            gate.idle()
        monkeypatch.undo()
        with gate.stream("much") as reply:  # who reads gets all of it
            assert sum(map(len, reply.iter_raw())) > 40_000_000


@pytest.mark.parametrize("apart", [False, True])
def test_who_asks_for_another_protocol_keeps_his_body(apart: bool) -> None:
    """As Java's own client does, with its first request on every connection."""
    with ScriptedEngine(plain) as engine, gated(engine) as gate, connect(gate) as connection:
        gate.ready(1)
        body = b'{"prompt": "\\r\\nconnection: upgrade"}'
        head = (
            b"POST /v1/completions HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\ncontent-length: %d\r\nhost: localhost\r\n"
            b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c\r\n\r\n" % len(body)
        )
        for piece in (head, body) if apart else (head + body,):
            connection.sendall(piece)
            gate.client.get("/ping")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        sent, got = engine.requests[-1]
        assert got == body and "upgrade" not in sent.lower() and "http2" not in sent.lower()


@pytest.mark.parametrize(("path", "query", "passes"), [(100, 100, True), (60_000, 100, False), (100, 60_000, False)])
def test_a_path_and_a_query_count_as_parts_of_the_head(path: int, query: int, passes: bool) -> None:
    with ScriptedEngine(plain) as engine, gated(engine) as gate, connect(gate) as connection:
        head = b"GET /%b?%b HTTP/1.1\r\nhost: localhost\r\na: %b\r\n\r\n" % (b"p" * path, b"q" * query, b"b" * 6000)
        connection.sendall(head)
        assert connection.recv(1000).startswith(b"HTTP/1.1 404" if passes else b"HTTP/1.1 431")
