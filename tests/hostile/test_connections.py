"""Connections that say nothing: with TLS or without, they take neither a server's memory nor its files."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.hostile.support import MIB, ServerProcess
from tests.hostile.test_memory import BACK_S
from tests.server.test_handshake import HALF_A_HELLO, trusting
from tests.server.tls import certificate
from tests.waiting import PATIENCE, eventually

pytestmark = [pytest.mark.zmq, pytest.mark.slow, pytest.mark.timeout(300)]
COUNT = 2000


def raw(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def silent(port: int, stack: contextlib.ExitStack) -> None:
    for _ in range(COUNT):
        stack.enter_context(raw(port))


def half_hellos(port: int, stack: contextlib.ExitStack) -> None:
    for _ in range(COUNT):
        with contextlib.suppress(ConnectionError):
            stack.enter_context(raw(port)).sendall(HALF_A_HELLO)


def half_heads(port: int, stack: contextlib.ExitStack) -> None:
    context = trusting()
    for _ in range(COUNT // 4):
        connection = stack.enter_context(context.wrap_socket(stack.enter_context(raw(port))))
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\nx-a: " + b"y" * 1000)


def dropped(port: int, stack: contextlib.ExitStack) -> None:
    context = trusting()
    for _ in range(COUNT // 4):
        with contextlib.suppress(ConnectionError, ssl.SSLError), context.wrap_socket(raw(port)) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n")


ATTACKS: list[Callable[[int, contextlib.ExitStack], None]] = [silent, half_hellos, half_heads, dropped]


@contextlib.contextmanager
def gateway(*arguments: str, files: int | None = None) -> Iterator[tuple[ServerProcess, httpx.Client]]:
    """A gateway in front of a mock, and a client that has a connection to it; ``files``: so many may be open."""
    prefix = () if files is None else ("prlimit", f"--nofile={files}:{files}")
    with contextlib.ExitStack() as stack:
        mock = stack.enter_context(ServerProcess("mock", "--workers", "1"))
        more = ("--fleet", mock.url, "--tokenizer", "bytes")
        server = stack.enter_context(ServerProcess("gateway", *more, *arguments, prefix=prefix))
        url = eventually(lambda: re.findall(r"(https?://127.0.0.1:\d+)", server.text), lambda: server.text)[0]
        client = stack.enter_context(httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False, verify=trusting()))
        eventually(lambda: client.get("/ready").status_code == 200, lambda: server.text)
        yield server, client


def asks(client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200


def test_memory_comes_back_with_tls(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    with gateway("--tls-cert", cert, "--tls-key", key) as (server, client):
        port, failed = client.base_url.port, list[str]()
        assert port is not None
        with contextlib.ExitStack() as stack:
            half_heads(port, stack)  # Python keeps some room for objects once it was needed
            asks(client)
        for attack in ATTACKS:
            before = server.rss
            with contextlib.ExitStack() as stack:
                attack(port, stack)
                asks(client)
                peak = server.rss
            end = time.monotonic() + BACK_S
            while server.rss > 1.1 * before and time.monotonic() < end:
                time.sleep(0.5)
            said = f"{attack.__name__}: {before / MIB:.0f}, {peak / MIB:.0f}, {server.rss / MIB:.0f} MiB"
            print("TLS", said, flush=True)
            if server.rss > 1.1 * before:
                failed.append(said)
        assert not failed, failed


def test_files_are_left_for_those_who_ask() -> None:
    """More silent connections than the process may have files: kept clients, new ones and engines are served."""
    if shutil.which("prlimit") is None:
        pytest.skip("needs prlimit")
    with gateway(files=256) as (server, client), contextlib.ExitStack() as stack:
        port = client.base_url.port
        assert port is not None
        for _ in range(400):
            stack.enter_context(raw(port))
        asks(client)
        with httpx.Client(base_url=client.base_url, timeout=PATIENCE, trust_env=False) as new:
            asks(new)
        assert "Too many open files" not in server.text
