"""A client's connection: what it may send, how long it may take, and that its hang-up is noticed."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable

import pytest
from tests.waiting import eventually, eventually_async

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.server.gateway import support
from tests.server.gateway.scripted_engine import ScriptedEngine, answer, chunked, connect, gated, plain
from tests.server.support import PATIENCE

from kvyard.server import connection as connections
from kvyard.server.held import HeldBytes
from kvyard.server.http import Bounds, Refusal
from kvyard.server.request import ClientGone, HttpRequest
from kvyard.server.running import HttpServer, TlsFiles, listen

pytestmark = pytest.mark.zmq


def closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_clients_that_send_no_head_or_half_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_client_that_reads_nothing_releases_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_request_to_upgrade_keeps_its_body(apart: bool) -> None:
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


# -- what a client may send ---------------------------------------------------------------------------------------------


class Echo:
    """Answers with method, path and body, once it may; notes who hung up."""

    bounds = Bounds(body_bytes=1 << 20)

    def __init__(self) -> None:
        self.held = HeldBytes(4 << 20)
        self.asked = 0
        self.gone = 0
        self.headers: list[dict[str, str]] = []
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def __call__(self, request: HttpRequest) -> None:
        self.asked += 1
        self.headers.append(dict(request))
        if request.path == "/early":
            request.respond(200, [], b"early")
            return
        try:
            request.abandon_with_client()
            body = await request.body(self.bounds)
            await self.go_on.wait()
        except Refusal as refusal:
            request.respond(refusal.status, [(b"connection", b"close")], b"")
        except asyncio.CancelledError:
            self.gone += 1
            raise
        except ClientGone:
            self.gone += 1
        else:
            if request.path == "/stream":
                request.start(200, [])
                await request.write(body)
                await request.finish()
            else:
                request.respond(200, [], b"%b %b %b" % (request.method.encode(), request.path.encode(), body))


def served(
    scenario: Callable[[Echo, HttpServer], Awaitable[None]], tls: TlsFiles | None = None, app: Echo | None = None
) -> None:
    async def run(app: Echo) -> None:
        server = HttpServer(app, listen("127.0.0.1", 0), drain_seconds=0.1, tls=tls)
        await server.start()
        try:
            await scenario(app, server)
        finally:
            await server.stop()
        assert (app.held.bytes, app.held.connection_bytes) == (0, 0), "all that was held is given back"

    asyncio.run(asyncio.wait_for(run(app or Echo()), PATIENCE))


async def said(server: HttpServer, *parts: bytes) -> bytes:
    """What is answered until the connection ends, to ``parts`` that come apart."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for part in parts:
        writer.write(part)
        await asyncio.sleep(0.02)  # so that the parts are mostly read apart; every test holds if they aren't
    found = await reader.read()
    writer.close()
    return found


def request_of(body: bytes = b"", path: str = "/", more: str = "connection: close\r\n") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n{more}\r\n".encode() + body


def test_pipelined_requests_are_answered_in_order() -> None:
    async def scenario(app: Echo, server: HttpServer) -> None:
        sent = [request_of(b"%d" % number, more="") for number in range(20)] + [request_of(b"last")]
        found = await said(server, b"".join(sent))
        bodies = [part.split(b"POST / ")[1] for part in found.split(b"HTTP/1.1 200 OK")[1:]]
        assert [body.strip() for body in bodies] == [*(b"%d" % number for number in range(20)), b"last"]

    served(scenario)


def test_pipelined_requests_are_bounded_in_number_and_bytes() -> None:
    async def scenario(app: Echo, server: HttpServer) -> None:
        app.go_on.clear()
        for flood in (b"GET / HTTP/1.1\r\nhost: a\r\n\r\n" * 5000, request_of(b"x" * 1000, more="") * 200):
            asked = app.asked
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(flood)
            await writer.drain()
            await eventually_async(lambda asked=asked: app.asked != asked)
            (connection,) = server._state.connections
            await asyncio.sleep(0.05)  # all that it will read of the flood
            assert len(connection._queue) <= connections.PIPELINED_REQUESTS
            assert len(connection._held) <= connections.PIPELINED_BYTES
            app.go_on.set()
            answers = await reader.read()
            assert 1 <= answers.count(b"HTTP/1.1 200") <= connections.PIPELINED_REQUESTS + 1
            writer.close()
            app.go_on.clear()
            await eventually_async(lambda: not server._state.connections)

    served(scenario)


def test_answers_that_are_not_read_hold_up_what_was_pipelined() -> None:
    async def scenario(app: Echo, server: HttpServer) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.transport.pause_reading()
        for _ in range(20):  # a megabyte each, of which sockets keep some
            writer.write(request_of(b"x" * (1 << 20), more=""))
        (connection,) = await eventually_async(lambda: server._state.connections)
        await eventually_async(connection.transport.get_write_buffer_size)
        for _ in range(100):  # time for the answers that must not be written
            await asyncio.sleep(0.01)
            assert connection.transport.get_write_buffer_size() <= 3 << 20
        writer.transport.abort()

    served(scenario)


@pytest.mark.parametrize("name", ["x-real", "authorization", "host"])
def test_trailers_are_no_headers(name: str) -> None:
    async def scenario(app: Echo, server: HttpServer) -> None:
        head = b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        found = await said(server, head + b"3\r\nabc\r\n0\r\n" + name.encode() + b": evil\r\n\r\n")
        assert b"evil" not in str(app.headers).encode()
        assert found.endswith(b"POST / abc")

    served(scenario)


@pytest.mark.parametrize("trailer", [b"a: b\r\n" * 50_000, b"a: " + b"b" * 300_000])
def test_trailers_are_bounded(trailer: bytes) -> None:
    async def scenario(app: Echo, server: HttpServer) -> None:
        head = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"
        assert b"HTTP/1.1 400" in await said(server, head, trailer)

    served(scenario)


def test_a_body_that_is_too_long_is_not_kept() -> None:
    async def scenario(app: Echo, server: HttpServer) -> None:
        part = b"40000\r\n" + b"x" * 0x40000 + b"\r\n"
        found = await said(server, b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n", *[part] * 8)
        assert found.startswith(b"HTTP/1.1 413")

    served(scenario)


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_another_protocol_is_declined_however_its_head_is_cut(cut: int) -> None:
    async def scenario(app: Echo, server: HttpServer) -> None:
        sent = request_of(b"body", more="connection: upgrade\r\nupgrade: h2c\r\n")
        sent += request_of(b"next")
        found = await said(server, sent[:cut], sent[cut:])
        assert found.count(b"HTTP/1.1 200") == 2 and b"POST / body" in found and found.endswith(b"POST / next")

    served(scenario)


def test_clients_of_http_1_0() -> None:
    async def scenario(app: Echo, server: HttpServer) -> None:
        found = await said(server, b"POST /stream HTTP/1.0\r\ncontent-length: 3\r\n\r\nabc")
        assert found.endswith(b"\r\n\r\nabc") and b"chunked" not in found
        kept = b"POST / HTTP/1.0\r\nconnection: keep-alive\r\ncontent-length: 1\r\n\r\na"
        found = await said(server, kept, b"GET / HTTP/1.0\r\n\r\n")
        assert found.count(b"HTTP/1.1 200") == 2 and b"connection: keep-alive" in found

    served(scenario)


@pytest.mark.parametrize(
    "sent",
    [
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nhalf",
        request_of(b"x" * 200_000, more=""),
        request_of(b"x" * 900_000, more=""),
        request_of(b"first", more="") + request_of(b"second"),
        request_of(b"first", more="") + b"POST / HTTP/1.1\r\nhost: a\r\ncontent-le",
        b"POST / HTTP/1.0\r\ncontent-length: 3\r\n\r\nabc",
    ],
    ids=["half a body", "200 KB", "900 KB", "pipelined", "half pipelined", "HTTP/1.0"],
)
@pytest.mark.parametrize("half", [False, True], ids=["closed", "half-closed"])
def test_a_hang_up_ends_a_request_at_every_stage(sent: bytes, half: bool) -> None:
    async def scenario(app: Echo, server: HttpServer) -> None:
        app.go_on.clear()
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        await writer.drain()
        await eventually_async(lambda: app.asked)
        if half:
            writer.write_eof()
        else:
            writer.close()
        await eventually_async(lambda: app.gone)
        assert app.asked == app.gone == 1
        writer.close()

    served(scenario)


@pytest.mark.parametrize(
    "sent", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nhost : a\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n"]
)
def test_malformed_requests_are_refused_and_not_within_an_answer(sent: bytes) -> None:
    async def scenario(app: Echo, server: HttpServer) -> None:
        assert (await said(server, sent)).startswith(b"HTTP/1.1 40")
        found = await said(server, request_of(b"fine", more="") + sent)
        assert found.count(b"HTTP/1.1") == 1 and found.endswith(b"POST / fine")

    served(scenario)


def test_unfinished_bodies_are_counted_and_bounded_in_all() -> None:
    async def scenario(app: Echo, server: HttpServer) -> None:
        head, opened = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n", []
        for _ in range(8):
            opened.append(await asyncio.open_connection("127.0.0.1", server.port))
            opened[-1][1].write(head + b"f0000\r\n" + b"x" * 0xF0000)
        # A megabyte each, of which four have room: the others are told so before their end, and hold nothing.
        answers = [reader for reader, _ in opened]
        waiting = {asyncio.ensure_future(reader.read()) for reader in answers}
        refused: set[asyncio.Future[bytes]] = set()
        while len(refused) < 4:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            refused |= done
        assert all(one.result().startswith(b"HTTP/1.1 429") for one in refused)
        assert 3 << 20 < app.held.bytes <= app.held.limit
        assert b"HTTP/1.1 429" in await said(server, request_of(b"x" * 600_000)), (
            "announced, and too long for what is left"
        )
        for _, writer in opened:
            writer.close()
        await asyncio.gather(*waiting)
        await eventually_async(lambda: not app.held.bytes)

    served(scenario)


_POST = b"POST / HTTP/1.1\r\nhost: a\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        _POST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        _POST + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        _POST + b"content-length: +3\r\n\r\nabc",
        _POST + b"content-length: 3, 3\r\n\r\nabc",
        _POST + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        _POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        _POST + b"transfer-encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n",
        _POST + b"transfer-encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n",
        _POST + b"x: a\x00b\r\n\r\n",
        _POST + b"x\x00: b\r\n\r\n",
        b"GET / HTTP/1.1\nhost: a\n\n",
        b"GET / HTTP/9.9\r\nhost: a\r\n\r\n",
        b"GET /a b HTTP/1.1\r\nhost: a\r\n\r\n",
    ],
)
def test_requests_that_two_servers_could_read_differently_are_refused(sent: bytes) -> None:
    async def scenario(app: Echo, server: HttpServer) -> None:
        found = await said(server, sent + b"GET /smuggled HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        assert (
            found.startswith((b"HTTP/1.1 400", b"HTTP/1.1 501"))
            and b"smuggled" not in found
            and found.count(b"HTTP/1.1") == 1
        )

    served(scenario)


def test_a_pipelined_head_that_is_too_long_leaves_nothing_counted() -> None:
    async def scenario(app: Echo, server: HttpServer) -> None:
        long = b"GET /b HTTP/1.1\r\nhost: a\r\n" + b"a:\r\n" * 15_400 + b"\r\n"
        found = await said(server, b"GET /a HTTP/1.1\r\nhost: a\r\n\r\n" + long)
        assert found.count(b"HTTP/1.1 200") == 1 and app.asked == 1

    served(scenario)


def test_unfinished_heads_are_counted_and_given_back() -> None:
    async def scenario(app: Echo, server: HttpServer) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n" + b"a: b\r\n" * 200)
        await eventually_async(lambda: app.held.bytes >= 200 * connections.HEADER_OVERHEAD)
        writer.close()
        await eventually_async(lambda: not app.held.bytes)
        many = b"GET / HTTP/1.1\r\nhost: a\r\n" + b"a: b\r\n" * 300 + b"\r\n"
        assert (await said(server, many)).startswith(b"HTTP/1.1 431")

    served(scenario)


def test_a_long_head_that_asks_for_another_protocol_hides_no_request() -> None:
    async def scenario(app: Echo, server: HttpServer) -> None:
        hidden = b"GET /hidden HTTP/1.1\r\nhost: a\r\n\r\n"
        head = (
            b"POST /p HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
            + (b"a: " + b"z" * 1000 + b"\r\n") * 80
        )
        found = await said(server, head + b"content-length: %d\r\n\r\n" % len(hidden) + hidden)
        assert found.startswith(b"HTTP/1.1 431") and app.asked == 0

    served(scenario)


def test_a_client_that_does_not_read_gets_few_answers() -> None:
    async def scenario(app: Echo, server: HttpServer) -> None:
        before = socket.create_connection(("127.0.0.1", server.port))
        before.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        before.setblocking(False)
        sent = request_of(b"x" * 1_000_000, "/big", "") * 60
        loop = asyncio.get_running_loop()
        sending = asyncio.ensure_future(loop.sock_sendall(before, sent))
        await eventually_async(lambda: app.asked)
        asked = 0
        while asked != app.asked:  # a busy machine may need longer, and then only sees fewer requests
            asked = app.asked
            await asyncio.sleep(0.3)
        assert asked < 20, "the rest waits until answers are read"
        sending.cancel()
        before.close()
        await eventually_async(lambda: not app.held.bytes)

    served(scenario)


def test_an_answer_goes_on_where_the_next_head_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.05)

    async def scenario(app: Echo, server: HttpServer) -> None:
        app.go_on.clear()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /long HTTP/1.1\r\nhost: a\r\n\r\nGET /x HT")
        await eventually_async(lambda: app.asked)
        writer.write(b"TP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        await asyncio.sleep(0.2)  # longer than a head may take, which must not end the answer
        app.go_on.set()
        assert (await reader.read()).count(b"HTTP/1.1 200") == 2
        writer.close()

    served(scenario)


def test_a_body_that_breaks_after_its_answer_brings_no_second_one() -> None:
    async def scenario(app: Echo, server: HttpServer) -> None:
        found = await said(server, b"GET /early HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n", b"zz\r\n")
        assert found.count(b"HTTP/1.1") == 1 and b"early" in found

    served(scenario)


def test_a_client_that_resets_its_connection_as_its_refusal_is_written(caplog: pytest.LogCaptureFixture) -> None:
    class Late(Echo):
        async def __call__(self, request: HttpRequest) -> None:
            request.respond(413, [(b"connection", b"close")], b"")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.close()

    async def scenario(app: Echo, server: HttpServer) -> None:
        client.connect(("127.0.0.1", server.port))
        client.sendall(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9000000\r\n\r\n")
        while client.fileno() >= 0 or app.held.connection_bytes:
            await asyncio.sleep(0.001)

    client = socket.socket()
    served(scenario, app=Late())
    assert not caplog.records, "its task failed"


def test_small_parts_of_a_body_are_joined_as_they_come() -> None:
    async def scenario(app: Echo, server: HttpServer) -> None:
        parts = b"2\r\nab\r\n" * 50_000
        head = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        assert (await said(server, head + parts + b"0\r\n\r\n")).endswith(b"ab" * 50_000)

    served(scenario)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n", 501),
        (b"GET / HTTP/1.0\r\n\r\n", 200),
    ],
)
def test_heads_that_the_standard_refuses(sent: bytes, status: int) -> None:
    async def scenario(app: Echo, server: HttpServer) -> None:
        assert (await said(server, sent)).startswith(b"HTTP/1.1 %d" % status)

    served(scenario)
