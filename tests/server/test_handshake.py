"""Connections with TLS, and the number of connections: what clients hold before they have said anything is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
from collections.abc import Iterator

import pytest
from tests.waiting import eventually_async

pytest.importorskip("httptools", reason="needs kvyard[server]")

from tests.server.test_connection import Echo, request_of, served
from tests.server.tls import certificate

from kvyard.server import handshake
from kvyard.server.held import CONNECTION_BYTES, TLS_BYTES
from kvyard.server.running import HttpServer, TlsFiles

PING = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
HALF_A_HELLO = b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc" + bytes(5000)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsFiles]:
    yield TlsFiles(*certificate(tmp_path_factory.mktemp("tls")))


def trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def reach(held: object, name: str, value: int) -> None:
    await eventually_async(lambda: getattr(held, name) == value)


def test_a_stream_goes_on(tls: TlsFiles) -> None:
    """However small its parts are, and however many."""

    class Streams(Echo):
        async def __call__(self, request: object) -> None:
            request.start(200, [])  # type: ignore[attr-defined]
            for at in range(100):
                await request.write(b"part %d " % at)  # type: ignore[attr-defined]
                await asyncio.sleep(0)
            await request.finish()  # type: ignore[attr-defined]

    async def scenario(app: Echo, server: HttpServer) -> None:
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting())
            writer.write(PING)
            assert b"part 99 " in await reader.readuntil(b"\r\n0\r\n\r\n")
            writer.close()

    served(scenario, tls, Streams())


def test_a_refusal_is_read_by_a_client_that_still_sends(tls: TlsFiles) -> None:
    async def scenario(app: Echo, server: HttpServer) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting())
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9000000\r\n\r\n")
        for _ in range(40):
            writer.write(b"x" * 100_000)
            await writer.drain()
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
        writer.close()

    served(scenario, tls)


@pytest.mark.parametrize("size", [0, 1000, 200_000])
def test_a_request_that_comes_with_the_end_of_the_handshake(tls: TlsFiles, size: int) -> None:
    async def scenario(app: Echo, server: HttpServer) -> None:
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting())
            writer.write(request_of(b"x" * size))
            assert (await reader.read()).endswith(b"POST / " + b"x" * size)
            writer.close()

    served(scenario, tls)


@pytest.mark.usefixtures("only_new_objects")
def test_connections_without_a_handshake_are_counted_and_make_way(tls: TlsFiles) -> None:
    async def scenario(app: Echo, server: HttpServer) -> None:
        each = CONNECTION_BYTES + TLS_BYTES
        room = app.held.limit // 2 // each
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(room)]
        for one in silent[::2]:
            one.sendall(HALF_A_HELLO)
        await reach(app.held, "connection_bytes", room * each)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting())
        writer.write(PING)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200"), "those that were silent make way"
        assert app.held.refused["connections"] == 1 and app.held.connection_bytes == room * each
        writer.close()
        gc.collect()
        gc.disable()
        try:
            for one in silent:
                one.close()
            await reach(app.held, "connection_bytes", 0)
            await eventually_async(
                lambda: not any(isinstance(one, ssl.SSLObject) and one.server_side for one in gc.get_objects()),
                lambda: "some of them wait for a search for garbage",
            )
        finally:
            gc.enable()

    served(scenario, tls)


def test_slow_handshakes_and_plain_text_are_refused(tls: TlsFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.2)

    async def scenario(app: Echo, server: HttpServer) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await reader.read() == b"" and app.held.refused["late"] == 1
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(PING)
        assert await reader.read() in (b"", b"\x15\x03\x01\x00\x02\x02F") and app.held.refused["malformed"] == 1
        writer.close()

    served(scenario, tls)


def test_an_end_does_not_wait_for_handshakes(tls: TlsFiles) -> None:
    async def scenario(app: Echo, server: HttpServer) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await reach(app.held, "connection_bytes", CONNECTION_BYTES + TLS_BYTES)
        await server.stop()
        with pytest.raises(ConnectionError):
            assert not await reader.read()
            raise ConnectionError
        writer.close()

    served(scenario, tls)


@pytest.mark.parametrize("way", ["closed", "reset", "close_notify alone"])
@pytest.mark.parametrize("size", [0, 200_000])
def test_a_hang_up_ends_a_request(tls: TlsFiles, way: str, size: int) -> None:
    async def scenario(app: Echo, server: HttpServer) -> None:
        app.go_on.clear()

        def ask() -> ssl.SSLSocket:
            connection = trusting().wrap_socket(socket.create_connection(("127.0.0.1", server.port)))
            connection.sendall(request_of(b"x" * size))
            return connection

        connection = await asyncio.to_thread(ask)
        await reach(app, "asked", 1)
        if way == "close_notify alone":
            with contextlib.suppress(ssl.SSLError, OSError):
                connection.settimeout(0.01)
                connection.unwrap()
        elif way == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if way != "close_notify alone":
            connection.close()
        await reach(app, "gone", 1)
        connection.close()
        await reach(app.held, "connection_bytes", 0)

    served(scenario, tls)


def test_silent_connections_make_way_for_others_and_busy_ones_stay() -> None:
    """A process may open a number of files alone, and each request of a proxy needs two."""

    async def ask(server: HttpServer, number: int) -> list[asyncio.Task[bytes]]:
        async def one() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            try:
                writer.write(request_of())
                return await reader.read()
            finally:
                writer.close()

        return [asyncio.create_task(one()) for _ in range(number)]

    async def scenario(app: Echo, server: HttpServer) -> None:
        app.held.connections = 8
        app.go_on.clear()
        busy = await ask(server, 4)
        await reach(app, "asked", 4)
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
        await eventually_async(lambda: app.held.refused["connections"] >= 36)
        busy += await ask(server, 4)
        await reach(app, "asked", 8)
        assert await asyncio.gather(*await ask(server, 1)) == [b""], "there is no room where all are busy"
        app.go_on.set()
        assert all(answer.startswith(b"HTTP/1.1 200") for answer in await asyncio.gather(*busy))
        for connection in silent:
            connection.close()

    served(scenario)


def test_files_are_left_for_engines() -> None:
    resource = pytest.importorskip("resource", reason="there are no such limits here")

    async def scenario(app: Echo, server: HttpServer) -> None:
        assert app.held.connections == resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2

    served(scenario)
