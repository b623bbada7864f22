"""Sockets and limits of a server."""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
from tests.server.tls import certificate
from tests.waiting import eventually_async

from kvyard.errors import KvyardError
from kvyard.server.held import HeldBytes
from kvyard.server.http import Bounds
from kvyard.server.request import HttpRequest
from kvyard.server.running import HttpServer, is_loopback, listen, tls_files, url_of


def test_small_answers_leave_at_once() -> None:
    """asyncio turns Nagle's algorithm off only for sockets that say they are TCP; it would cost 40 ms an answer."""
    with listen("127.0.0.1", 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP
        assert url_of(bound) == f"http://127.0.0.1:{bound.getsockname()[1]}"
        bound.listen()
        with pytest.raises(KvyardError, match=r"can't listen at 127\.0\.0\.1"):
            listen("127.0.0.1", bound.getsockname()[1])


@pytest.mark.parametrize(
    ("host", "only_here"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("example.com", False)],
)
def test_loopback(host: str, only_here: bool) -> None:
    assert is_loopback(host) is only_here


def test_as_many_files_as_there_may_be() -> None:
    program = (
        "import resource as r; from kvyard.server.running import allow_files; hard = r.getrlimit(r.RLIMIT_NOFILE)[1];"
        "r.setrlimit(r.RLIMIT_NOFILE, (64, hard)); allow_files(); print(r.getrlimit(r.RLIMIT_NOFILE)[0] > 64)"
    )
    pytest.importorskip("resource", reason="there are no such limits here")
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "True"


def test_an_end_is_seen_at_once_and_so_is_the_last_client_that_goes() -> None:
    pytest.importorskip("httptools", reason="needs kvyard[server]")

    async def served() -> None:
        app = Waiting()
        server = HttpServer(app, listen("127.0.0.1", 0), drain_seconds=3600)
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        await app.asked.wait()
        threading.Thread(target=server.end).start()
        await eventually_async(lambda: server.ending)
        app.go_on.set()
        assert (await reader.read()).endswith(b"\r\n\r\nok"), "what was under way goes out"
        await server.wait()
        writer.close()

    asyncio.run(asyncio.wait_for(served(), 60))


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("turns", range(4))
def test_connections_that_are_accepted_as_the_server_ends_are_closed(turns: int, dies: bool) -> None:
    pytest.importorskip("httptools", reason="needs kvyard[server]")
    bound = listen("127.0.0.1", 0)
    clients = [socket.socket() for _ in range(5)]

    async def served() -> None:
        server = HttpServer(Waiting(), bound)
        await server.start()
        for client in clients:
            client.connect(bound.getsockname())
        for _ in range(turns):
            await asyncio.sleep(0)
        if dies:
            server.die()
        await server.stop()

    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        asyncio.run(served())
        gc.collect()
    for client in clients:
        client.close()
    assert [str(warning.message) for warning in caught] == []


class Waiting:
    """Answers when it may."""

    bounds = Bounds()
    held = HeldBytes()

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, request: HttpRequest) -> None:
        self.asked.set()
        await self.go_on.wait()
        request.respond(200, [], b"ok")


def test_a_certificate_that_cannot_be_used_any_more_stays_as_it_was(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    files = tls_files(cert, key)
    assert files is not None
    first = files.context()
    Path(cert).write_text("")
    assert files.context() is first
    with pytest.raises(KvyardError, match="give both as PEM"):
        tls_files(cert, key)
