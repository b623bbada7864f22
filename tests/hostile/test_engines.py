"""Engines that answer with more than was asked for: what they make a gateway hold is bounded, counted, and given back."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
from collections.abc import Iterator, Sequence

import pytest

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.hostile.support import MIB
from tests.server.gateway.scripted_engine import ScriptedEngine, answer, chunked, connect, gated, plain
from tests.server.gateway.support import PATIENCE
from tests.waiting import eventually

from kvyard.server.gateway import members
from kvyard.server.gateway.connections import EngineConnection
from kvyard.server.gateway.exchange import ERROR_BYTES
from kvyard.server.gateway.traffic import GatewayTraffic, RequestRecord

pytestmark = pytest.mark.zmq
ASKED = b'POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 15\r\n\r\n{"prompt": "a"}'


class Endless(Sequence[bytes]):
    """The pieces of an answer without an end, until ``most`` bytes; the connection is left open then."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.sent = 0

    def __getitem__(self, index: int) -> bytes:  # type: ignore[override]
        return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[bytes]:
        yield self[0]
        while self.sent < self.most:
            self.sent += 64 << 10
            yield b"10000\r\n" + b" " * (64 << 10) + b"\r\n"


@pytest.mark.parametrize("path", ["/tokenize", "/v1/load_lora_adapter", "/close_session"])
def test_an_endless_answer_to_a_question_of_ours_is_not_read_on(path: str) -> None:
    endless = Endless(64 * MIB)

    def script(head: str, body: bytes) -> Sequence[bytes]:
        return endless if f" {path} " in head else plain(head, body)

    with ScriptedEngine(script) as engine, gated(engine, tokenizer="engine") as gate:
        gate.ready(1)
        if path == "/tokenize":
            assert gate.complete("some words").json() == {}
        elif path == "/close_session":
            gate.post(path, session_id="a")
        else:
            gate.client.post(path, json={"lora_name": "a", "lora_path": "b"})
        assert endless.sent < 32 * MIB, "the connection was closed, but for what the system has in between"


@pytest.mark.parametrize("size", [MIB // 2, 3 * MIB])
def test_an_answer_is_counted_while_it_is_waited_for(size: int) -> None:
    """Beyond the limit it is handed on as it comes."""
    go_on = threading.Event()

    class Halted(Sequence[bytes]):
        def __getitem__(self, index: int) -> bytes:  # type: ignore[override]
            return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (size + 1)

        def __len__(self) -> int:
            return 1

        def __iter__(self) -> Iterator[bytes]:
            yield self[0]
            for _ in range(8):
                yield b"x" * (size // 8)
            go_on.wait(PATIENCE)
            yield b"!"

    with ScriptedEngine(lambda head, body: Halted()) as engine, gated(engine, held_bytes=2 * MIB) as gate:
        held = gate.ready(1).gateway.held
        with connect(gate) as client:
            client.sendall(ASKED)
            if size < MIB:
                eventually(lambda: held.bytes >= size, lambda: held.bytes)
            else:
                assert client.recv(15) == b"HTTP/1.1 200 OK", "there is no room to hold it"
            go_on.set()
            received = b""
            while b"!" not in received:
                received = client.recv(1 << 16)
                assert received, "it was cut"
            eventually(lambda: held.bytes < MIB // 4, lambda: held.bytes)
        gate.idle()


def test_bytes_of_an_answer_that_breaks_off_are_given_back() -> None:
    def script(head: str, body: bytes) -> Sequence[bytes]:
        return [b"HTTP/1.1 200 OK\r\ncontent-length: 9999999\r\n\r\n", b"x" * 400_000, b"x" * 400_000]

    with ScriptedEngine(script) as engine, gated(engine) as gate:
        engine.hangs_up = True
        gate.ready(1).complete("a", 502)
        eventually(lambda: gate.gateway.held.bytes == 0, lambda: gate.gateway.held.bytes)


def test_a_long_error_is_not_kept() -> None:
    """Another engine answers; the body of one whose error is longer isn't needed."""
    for size in (1000, ERROR_BYTES + MIB):
        body = json.dumps({"error": "x" * size}).encode()
        with ScriptedEngine(lambda head, _, body=body: [answer("503 No", body)]) as engine, gated(engine) as gate:
            reply = gate.ready(1).complete("a", 503)
            assert ("x" * 1000 in reply.text) is (size == 1000)
            assert size == 1000 or "more than" in reply.json()["error"]["message"]


def test_a_connection_whose_request_was_not_taken_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine answers at once and reads no more than the head: what is left would stand before the next request."""
    made = EngineConnection.connection_made

    def with_little_room(self: EngineConnection, transport: asyncio.BaseTransport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        made(self, transport)

    monkeypatch.setattr(EngineConnection, "connection_made", with_little_room)
    taken: list[bytes] = []

    class Hasty(ScriptedEngine):
        def _one(self, connection: object, file: object) -> bool:
            line = file.readline()  # type: ignore[attr-defined]
            if not line.startswith(b"POST"):
                return self._look(connection, file, line)
            taken.append(line)
            connection.sendall(answer("200 OK", b"{}"))  # type: ignore[attr-defined]
            threading.Event().wait(PATIENCE if len(taken) == 1 else 0)
            return False

        def _look(self, connection: object, file: object, line: bytes) -> bool:
            while line and line.strip():
                first, line = line, file.readline()  # type: ignore[attr-defined]
                if first.startswith(b"GET"):
                    body = self.models if b"/v1/models" in first else b"{}"
                    status = "200 OK" if b"/v1/models" in first or b"/health" in first else "404 No"
                    connection.sendall(answer(status, body))  # type: ignore[attr-defined]
            return bool(line)

    with Hasty(plain) as engine, gated(engine) as gate:
        engine._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        gate.ready(1)
        gate.complete("a" * 12 * MIB)
        gate.complete("b")
        assert len(taken) == 2


def test_an_engine_that_lists_ever_more_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many at once make it unwell; new ones at every look end with a limit."""
    monkeypatch.setattr(members, "MOST_POOLS", 20)
    names = [{"id": f"m{number}"} for number in range(150_000)]
    many = json.dumps({"data": [{"id": "odd"}, *names]}, separators=(",", ":")).encode()

    class Renamed(ScriptedEngine):
        models = property(lambda self: next(self.pages), lambda self, value: None)  # type: ignore[assignment]
        pages: Iterator[bytes] = (b'{"data":[{"id":"m%d"}]}' % number for number in range(10**9))

    with ScriptedEngine(plain, many) as engine, gated(engine) as gate:
        eventually(lambda: "can't be read" in gate.client.get("/admin/engines").text)
        assert len(gate.gateway.members.names) == 0
    with Renamed(plain) as engine, gated(engine, health_seconds=0.05) as gate:
        eventually(
            lambda: "model number 21" in gate.client.get("/admin/engines").text,
            lambda: gate.client.get("/admin/engines").text,
        )
        assert len(gate.gateway.members.pools) == 20


def test_a_client_cannot_hide_its_usage_by_asking_for_compression() -> None:
    usage = b'{"usage": {"prompt_tokens": 70, "completion_tokens": 30}}'

    def script(head: str, body: bytes) -> Sequence[bytes]:
        if "gzip" not in head:
            return [answer("200 OK", usage)]
        return [answer("200 OK", gzip.compress(usage), more="content-encoding: gzip\r\n")]

    with ScriptedEngine(script) as engine, gated(engine) as gate:
        reply = gate.ready(1).complete("a", headers={"Accept-Encoding": "gzip"})
        assert reply.json() == json.loads(usage)
        assert gate.gateway.traffic.counters.output_tokens == 30


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_events_count_whatever_ends_their_lines(end: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits count a stream that states no usage by its events."""
    counted = list[int]()
    ended = GatewayTraffic.ended

    def noted(self: GatewayTraffic, proxied: RequestRecord, outcome: str) -> None:
        counted.append(proxied.events)
        ended(self, proxied, outcome)

    monkeypatch.setattr(GatewayTraffic, "ended", noted)
    with (
        ScriptedEngine(lambda head, body: chunked(*[b'data: {"choices":[]}' + end] * 20)) as engine,
        gated(engine) as gate,
    ):
        with gate.ready(1).stream("a") as reply:
            reply.read()
        eventually(lambda: counted == [20], lambda: counted)
