"""Connections to engines: what is sent, what is read, how they fail, and when they are used again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from tests.server.gateway.scripted_engine import answer
from tests.server.gateway.support import PATIENCE
from tests.waiting import eventually_async

from kvyard.server.gateway import connections as module
from kvyard.server.gateway.connections import IDLE_SECONDS, EngineAddress, EngineConnections
from kvyard.server.gateway.failures import EngineFailed

Writer = asyncio.StreamWriter
Script = Callable[[Writer, int], Awaitable[None]]
"""Answers a request, of which it is told how many came before it over this connection."""


class Server:
    """An engine on this loop."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.accepted = 0

    async def serve(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        self.accepted += 1
        number = 0
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                self.heads.append(head)
                self.bodies.append(await reader.readexactly(length))
                await self.script(writer, number)
                number += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def engine(
    script: Script, silent: float = PATIENCE
) -> AsyncIterator[tuple[Server, EngineConnections, EngineAddress]]:
    server = Server(script)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    made = EngineConnections(PATIENCE, silent)
    try:
        async with asyncio.timeout(PATIENCE):
            yield server, made, EngineAddress.of(f"http://127.0.0.1:{port}/base")
    finally:
        made.close()
        listening.close()


def says(*parts: bytes, close: bool = False) -> Script:
    async def script(writer: Writer, number: int) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        if close:
            writer.close()

    return script


async def whole(
    connections: EngineConnections, address: EngineAddress, body: bytes | None = b"{}"
) -> tuple[int, bytes]:
    found = await connections.take(address)
    try:
        await found.ask("POST", b"/v1/x?a=b", [(b"x-a", b"\xff")], body)
        parts = []
        while part := await found.read():
            parts.append(part)
        status = found.status
    except BaseException:
        found.close()
        raise
    found.release()
    return status, b"".join(parts)


def test_a_sink_gets_what_comes_until_it_takes_no_more() -> None:
    async def scenario() -> None:
        going, taken = asyncio.Event(), list[bytes]()

        async def script(writer: Writer, number: int) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for said in (b"a", b"b", b"c", b"d"):
                await going.wait()
                going.clear()
                writer.write(b"1\r\n%b\r\n" % said)
            await going.wait()
            writer.write(b"1\r\ne\r\n0\r\n\r\n")

        def sink(chunk: bytes) -> bool:
            going.set()
            if chunk == b"c":
                return False
            taken.append(chunk)
            return True

        async with engine(script) as (_, connections, address):
            found = await connections.take(address)
            await found.ask("POST", b"/", [], b"{}")
            going.set()
            await found.pass_to(sink)
            assert taken == [b"a", b"b"] and await found.read() == b"c"
            await found.pass_to(sink)  # the end is for the reader too, so that it can end what it writes with it
            assert taken == [b"a", b"b", b"d"] and (await found.read(), found.complete) == (b"e", True)
            await found.pass_to(sink)  # nothing comes any more
            assert await found.read() == b""

    asyncio.run(scenario())


def test_a_sink_may_get_more_at_once_than_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """As over TLS, where what one read brings is longer by the rest of a record: the engine isn't made to wait for ever."""
    monkeypatch.setattr(module, "HIGH_WATER", 1000)
    going, taken = asyncio.Event(), list[bytes]()

    async def script(writer: Writer, number: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(3):
            await going.wait()
            going.clear()
            writer.write(b"%x\r\n%b\r\n" % (5000, b"x" * 5000))
        await going.wait()
        writer.write(b"0\r\n\r\n")

    def sink(chunk: bytes) -> bool:
        taken.append(chunk)
        if not sum(map(len, taken)) % 5000:
            going.set()
        return True

    async def scenario() -> None:
        async with engine(script) as (_, connections, address):
            found = await connections.take(address)
            await found.ask("POST", b"/", [], b"{}")
            going.set()
            while not found.complete:
                await found.pass_to(sink)
            assert b"".join(taken) == b"x" * 15_000 and await found.read() == b""

    asyncio.run(scenario())


def test_a_sink_learns_by_the_reader_that_the_engine_failed() -> None:
    async def scenario() -> None:
        async with engine(says(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n", close=True)) as (
            _,
            connections,
            address,
        ):
            found = await connections.take(address)
            await found.ask("POST", b"/", [], b"{}")
            assert await found.read() == b"a"
            with pytest.raises(EngineFailed, match="closed"):
                await found.pass_to(lambda chunk: True)
                await found.read()

    asyncio.run(scenario())


def test_one_connection_serves_one_request_after_the_other() -> None:
    async def scenario() -> None:
        async with engine(says(answer("200 OK", b"yes"))) as (server, connections, address):
            for size in (2, module.TOGETHER + 1):
                assert await whole(connections, address, b"x" * size) == (200, b"yes")
            assert server.accepted == 1
            assert server.bodies == [b"xx", b"x" * (module.TOGETHER + 1)]
            assert server.heads[0].startswith(b"POST /base/v1/x?a=b HTTP/1.1\r\nHost: 127.0.0.1:")
            assert b"\r\nx-a: \xff\r\n" in server.heads[0]

    asyncio.run(scenario())


def test_an_engine_may_say_first_that_it_goes_on() -> None:
    async def scenario() -> None:
        said = b"HTTP/1.1 100 Continue\r\nx-early: 1\r\n\r\n" + answer("201 Created", b"yes")
        async with engine(says(said)) as (server, connections, address):
            assert await whole(connections, address) == (201, b"yes")
            assert await whole(connections, address) == (201, b"yes")
            assert server.accepted == 1

    asyncio.run(scenario())


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def test_trailers_are_no_headers() -> None:
    async def scenario() -> None:
        trailers = b"content-type: text/html\r\nx-late: 1\r\n"
        async with engine(says(CHUNKED + b"1\r\na\r\n0\r\n" + trailers + b"\r\n")) as (server, connections, address):
            for _ in range(2):
                connection = await connections.take(address)
                await connection.ask("GET", b"/", [], None)
                assert await connection.read() == b"a" and await connection.read() == b""
                assert connection.headers == [(b"transfer-encoding", b"chunked")] and connection.content_type == b""
                connection.release()
            assert server.accepted == 1

    asyncio.run(scenario())


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async def scenario() -> None:
        said = says(b"HTTP/1.1 200 OK\r\n\r\n", b"some", b"thing", close=True)
        async with engine(said) as (server, connections, address):
            assert await whole(connections, address) == (200, b"something")
            assert await whole(connections, address) == (200, b"something")
            assert server.accepted == 2

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (says(close=True), "closed the connection"),
        (says(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", close=True), "closed the connection"),
        (
            says(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", close=True),
            "closed the connection",
        ),
        (says(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nabc\r\n"), "can't be read"),
        (says(b"no HTTP at all\r\n\r\n"), "can't be read"),
        (says(b"HTTP/1.1 200 OK\r\n" + b"x-a: b\r\n" * 40_000), "too long"),
        (says(CHUNKED + b"0\r\n" + b"x-a: b\r\n" * 80_000), "too long trailers"),
        (says(CHUNKED + b"1;" + b"x" * 600_000), "too long trailers"),
        (says(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"), "another protocol"),
    ],
)
def test_an_answer_that_breaks_off_or_is_none(said: Script, reason: str) -> None:
    async def scenario() -> None:
        async with engine(said) as (_, connections, address):
            with pytest.raises(EngineFailed, match=reason) as caught:
                await whole(connections, address)
            assert caught.value.reached and not caught.value.gone

    asyncio.run(scenario())


def test_an_engine_that_is_silent_for_too_long() -> None:
    async def scenario() -> None:
        async with engine(says(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc"), silent=0.05) as (_, made, address):
            with pytest.raises(EngineFailed, match="silent"):
                await whole(made, address)

    asyncio.run(scenario())


def test_half_an_answer_without_a_length_is_no_whole_one() -> None:
    """It ends with its connection, but not where this side ends that."""

    async def scenario() -> None:
        half = says(b"HTTP/1.1 200 OK\r\n\r\nabc")
        async with engine(half, silent=0.05) as (_, made, address):
            with pytest.raises(EngineFailed, match="silent"):
                await whole(made, address)
        async with engine(half) as (_, made, address):
            found = await made.take(address)
            await found.ask("GET", b"/", [], None)
            assert await found.read() == b"abc"
            waiting = asyncio.create_task(found.read())
            await asyncio.sleep(0)
            made.close()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    asyncio.run(scenario())


def test_an_engine_that_is_made_to_wait_is_not_silent() -> None:
    async def scenario() -> None:
        size = 32 << 20
        async with engine(says(answer("200 OK", b"x" * size)), silent=0.2) as (_, made, address):
            found = await made.take(address)
            await found.ask("GET", b"/", [], None)
            await eventually_async(lambda: found.paused)
            await asyncio.sleep(0.5)  # longer than an engine may be silent
            got = 0
            while part := await found.read():
                got += len(part)
            assert got == size
            found.release()

    asyncio.run(scenario())


def test_no_engine_at_all() -> None:
    async def scenario() -> None:
        async with engine(says()) as (_, connections, _address):
            listening = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
            port = listening.sockets[0].getsockname()[1]
            listening.close()
            await listening.wait_closed()
            with pytest.raises(EngineFailed, match="can't be reached") as caught:
                await connections.take(EngineAddress.of(f"http://127.0.0.1:{port}"))
            assert caught.value.gone and not caught.value.reached

    asyncio.run(scenario())


def test_an_unsolicited_answer_ends_a_connection() -> None:
    """An answer too many would be taken for that to the next request."""

    async def scenario() -> None:
        twice = answer("200 OK", b"yes") + answer("404 Not Found", b"no")
        async with engine(says(twice)) as (server, connections, address):
            assert await whole(connections, address) == (200, b"yes")
            assert await whole(connections, address) == (200, b"yes")
            assert server.accepted == 2
        async with engine(says(answer("200 OK", b"yes") + b"HTTP/1.1 4")) as (server, connections, address):
            assert await whole(connections, address) == (200, b"yes")
            assert await whole(connections, address) == (200, b"yes")
            assert server.accepted == 2
        async with engine(says(answer("200 OK", b"yes"))) as (server, connections, address):
            found = await connections.take(address)
            await found.ask("GET", b"/", [], None)
            assert await found.read() == b"yes"
            found.release()
            found.data_received(answer("404 Not Found", b"no"))
            assert await whole(connections, address) == (200, b"yes")
            assert server.accepted == 2

    asyncio.run(scenario())


def test_a_reader_that_waits_makes_the_engine_wait() -> None:
    async def scenario() -> None:
        size = 32 << 20
        async with engine(says(answer("200 OK", b"x" * size))) as (_, connections, address):
            found = await connections.take(address)
            await found.ask("GET", b"/", [], None)
            for _ in range(200):
                await asyncio.sleep(0)
            first = await found.read()
            assert 0 < len(first) < 4 * module.HIGH_WATER
            rest = len(first)
            while part := await found.read():
                rest += len(part)
            assert rest == size
            found.release()

    asyncio.run(scenario())


def test_the_end_cancels_those_who_wait() -> None:
    async def scenario() -> None:
        async with engine(says()) as (server, connections, address):
            waiting = asyncio.create_task(whole(connections, address))
            await eventually_async(lambda: server.heads)
            connections.close()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    asyncio.run(scenario())


def test_addresses() -> None:
    found = EngineAddress.of("https://[::1]/v")
    assert (found.host, found.port, found.tls, found.authority, found.base) == ("::1", 443, True, b"[::1]", b"/v")


def test_idle_connections_are_closed_at_their_limit() -> None:
    class Idle:
        busy, closed = False, False

        def __init__(self, heard: float) -> None:
            self.heard = heard

        def close(self) -> None:
            self.closed = True

    async def look() -> list[bool]:
        connections = EngineConnections(1.0, 1.0)
        kept = [Idle(100.0 - IDLE_SECONDS + later) for later in (-1.0, 0.0, 1.0)]
        connections.now = lambda: 100.0  # type: ignore[method-assign]
        connections._all = set(kept)  # type: ignore[arg-type]
        connections._look()
        connections._timer.cancel()
        return [one.closed for one in kept]

    assert asyncio.run(look()) == [True, True, False]
