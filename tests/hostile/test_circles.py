"""Whatever a client does, nothing of its connection and request is left for a search for garbage."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.hostile.support import connect
from tests.server.gateway.scripted_engine import ScriptedEngine, gated, plain
from tests.server.gateway.test_gateway_garbage import OURS, TRANSPORT, circles
from tests.server.mock.support import Served as MockServed
from tests.server.support import Served

pytestmark = pytest.mark.zmq
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
ODD = {
    "half a head": b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-a: ",
    "a long head": b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"x-a: b\r\n" * 400 + b"\r\n",
    "half a body": POST + b'content-length: 100\r\n\r\n{"prompt":',
    "a long body": POST + b"content-length: 99999999\r\n\r\n",
    "bad chunks": POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    "trailers": POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: y\r\n\r\n",
    "no JSON": POST + b"content-length: 2\r\n\r\n{]",
    "pipelined": b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 50,
    "an upgrade": b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
    "no route": b"GET /nothing HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01",
    "HTTP/1.0": b"GET /health HTTP/1.0\r\n\r\n",
}


@contextlib.contextmanager
def server(kind: str) -> Iterator[str]:
    if kind == "gateway":
        with ScriptedEngine(plain) as engine, gated(engine) as gate:
            yield gate.ready(1).url
    else:
        with Served() if kind == "index" else MockServed() as served:
            yield served.url


@pytest.mark.parametrize("kind", ["gateway", "index", "mock"])
def test_no_circles(kind: str) -> None:
    def send(data: bytes, *, read: bool, reset: bool) -> None:
        with connect(url) as connection:
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.sendall(data)
            if read:
                connection.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionError):
                    while connection.recv(65536):
                        pass

    with server(kind) as url:
        send(ODD["no route"], read=True, reset=False)
        with circles() as left:
            for data in ODD.values():
                send(data, read=True, reset=False)
                send(data, read=False, reset=False)
                send(data, read=False, reset=True)
            for _ in range(5):
                send(ODD["no route"], read=True, reset=False)
        assert not [name for name in left if name.startswith(OURS)], left
        assert left[TRANSPORT] < 5, left
