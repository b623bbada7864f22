"""What hostile clients make servers hold is bounded, and given back within 30 seconds."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable

import httpx
import pytest

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.hostile.support import KINDS, MIB, ServerProcess, connect, ping, send_what_goes, serving
from tests.server.support import PATIENCE

pytestmark = [pytest.mark.zmq, pytest.mark.slow, pytest.mark.timeout(300)]
REST = b" HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
HEAD = b"POST /v1/completions" + REST
BACK_S = 30.0
"""Seconds after which a server is to be as small as it was."""

Attack = Callable[[str], None]


def pipelined(url: str) -> None:
    """Twenty MiB of requests on each of three connections whose answers are never read."""
    for _ in range(3):
        with connect(url) as connection:
            send_what_goes(connection, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * (20 * MIB // 44))


def trailers(url: str) -> None:
    with connect(url) as connection:
        connection.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n")
        send_what_goes(connection, (b"x-trailer: " + b"y" * 100 + b"\r\n") * (100 * MIB // 113))


def endless_head(url: str) -> None:
    for line in (b"x-a: b\r\n", b"x" * 4096):
        with connect(url) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n")
            send_what_goes(connection, line * (50 * MIB // len(line)))


def unfinished_bodies(url: str) -> None:
    """Twenty-four bodies of 16 MiB, less a byte."""
    with contextlib.ExitStack() as stack:
        for _ in range(24):
            connection = stack.enter_context(connect(url))
            length = 16 * MIB
            send_what_goes(connection, HEAD + b"content-length: %d\r\n\r\n" % length + b" " * (length - 1))


def small_chunks(url: str) -> None:
    """Bodies of chunks of one byte: each may not take more as an object."""
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            connection = stack.enter_context(connect(url))
            connection.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
            send_what_goes(connection, b"1\r\nx\r\n" * (2 * MIB))


def large_lists(url: str) -> None:
    """Ten prompts of 16 MiB of short numbers at a time."""
    body = b'{"prompt":[1' + b",1" * (8 * MIB - 20) + b"]}"
    for _ in range(3):
        with contextlib.ExitStack() as stack:
            for _ in range(10):
                connection = stack.enter_context(connect(url))
                send_what_goes(connection, HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
            ping(url)


def connections(url: str) -> None:
    """A thousand connections with half a head each."""
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(connect(url)).sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-a: " + b"y" * 1000)
        ping(url)


def hung_up(url: str) -> None:
    """A thousand requests whose clients hang up, some with a reset."""
    body = b'{"prompt":"' + b"a" * 10_000 + b'","max_tokens":500,"stream":true}'
    for at in range(1000):
        with connect(url) as connection:
            if at % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)


ATTACKS: list[Attack] = [
    *(pipelined, trailers, endless_head, unfinished_bodies, small_chunks, large_lists, connections, hung_up),
]


def warm_up(server: ServerProcess) -> None:
    """Ask for what is asked for later, so that all that is loaded at first is."""
    with httpx.Client(base_url=server.url, timeout=PATIENCE, trust_env=False) as client:
        for at in range(200):
            client.get("/health")
            client.get("/metrics")
            client.post("/v1/completions", json={"prompt": f"{at}" * 100, "max_tokens": 2})
    with connect(server.url) as connection:
        send_what_goes(connection, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1000)
    connections(server.url)  # Python keeps some room for objects once it was needed


@pytest.mark.parametrize("kind", KINDS)
def test_memory_comes_back(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "index":  # or nothing would read its bodies
        monkeypatch.setattr(sys.modules[__name__], "HEAD", b"POST /score" + REST)
    with serving(kind) as server:
        warm_up(server)
        failed = list[str]()
        for attack in ATTACKS:
            before = server.rss
            attack(server.url)
            peak = server.rss
            ping(server.url)
            end = time.monotonic() + BACK_S
            while server.rss > 1.1 * before and time.monotonic() < end:
                time.sleep(0.5)
            after = server.rss
            said = f"{attack.__name__}: {before / MIB:.0f}, {peak / MIB:.0f}, {after / MIB:.0f} MiB"
            print(kind, said, flush=True)
            if after > 1.1 * before:
                failed.append(said)
        assert not failed, failed
