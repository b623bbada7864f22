"""Connections to engines: HTTP/1.1 as a proxy needs it, one request at a time over each, kept for the next one.

A general client library takes longer over a short request than all else that the gateway does for it. Here bytes go out as they
came in, an answer's are handed on as they come, and what the gateway doesn't need isn't there: no cookies, redirects,
compression, or proxies.
"""

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias
from urllib.parse import urlsplit

import httptools
import msgspec

from kvyard.server.gateway.failures import EngineFailed, unreachable
from kvyard.server.transports import untie

IDLE_SECONDS = 4.0
"""Seconds for which a connection is kept between requests. Most engines close idle ones after five seconds; ours must go
first, or a request meets a closed one."""
HIGH_WATER = 256 << 10
"""Bytes of an answer that wait for the client; an engine that sends more is made to wait."""
HEAD_BYTES = 256 << 10
"""Most bytes in the head of an answer."""
TOGETHER = 64 << 10
"""Bytes up to which a body is copied behind its head, so that both leave in one write."""
LOOKED_AT = 4 << 20
"""Bytes of an answer to a question of ours that are read."""
CLOSED = "it closed the connection"


class EngineAddress(msgspec.Struct, frozen=True):
    """Parsed address of an engine."""

    host: str
    port: int
    tls: bool
    authority: bytes
    """For the Host header."""
    base: bytes
    """Prefix of every path."""

    @classmethod
    def of(cls, url: str) -> "EngineAddress":
        """Return the address in ``url``, which ``check_url`` must accept."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        tls = parts.scheme == "https"
        authority = parts.netloc.encode("idna" if not parts.netloc.isascii() else "ascii")
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, authority, parts.path.encode())


class Room(Protocol):
    """Counter of bytes of an answer that is waited for."""

    def hold(self, size: int) -> None: ...
    def has_room(self, more: int) -> bool: ...


ChunkSink: TypeAlias = Callable[[bytes], bool]
"""Takes a piece of an answer at once; returns whether it did."""


class EngineConnection(asyncio.Protocol):
    """One connection, and the answer that comes over it. Methods raise ``EngineFailed``, and ``CancelledError`` where the
    gateway has ended meanwhile.
    """

    def __init__(self, connections: "EngineConnections", address: EngineAddress) -> None:
        self.address = address
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.content_type = b""
        """Content type of the answer, in lower case and without parameters."""
        self.complete = False
        """True if all of the answer came."""
        self.busy = False
        self.heard = 0.0
        """Time of the latest data, or of its release."""
        self._connections = connections
        self._transport: Any = None
        self._parser: Any = None
        self._parts: list[bytes] = []
        self._waiting = 0
        """Bytes in ``_parts``."""
        self._head = 0
        """Bytes that came before the head was whole."""
        self._begun = False
        """True if the answer's head was received."""
        self._until_closed = False
        """True if the answer ends with the connection."""
        self._reusable = True
        self._surplus = False
        """True if more came than was asked for."""
        self.aborted = False
        """True if this side ended the connection."""
        self.paused = False
        """True if the engine is made to wait, since the client is slower."""
        self._sink: ChunkSink | None = None
        """Takes what comes, instead of the reader."""
        self._reader: asyncio.Future[None] | None = None
        self._failure = ""
        """Why nothing more will come. An exception that is kept would keep the frames it was raised in, and they us."""

    # -- for its user -----------------------------------------------------------------------------------------------

    async def ask(self, method: str, target: bytes, headers: Sequence[tuple[bytes, bytes]], body: bytes | None) -> None:
        """Send a request and wait for the head of its answer."""
        self._parser = httptools.HttpResponseParser(self)
        self.status, self.headers, self._parts, self._waiting, self._head = 0, [], [], 0, 0
        self.complete = self._begun = self._until_closed = False
        self._reusable = True
        lines = [
            b"%b %b%b HTTP/1.1\r\nHost: %b\r\n" % (method.encode(), self.address.base, target, self.address.authority)
        ]
        lines += [b"%b: %b\r\n" % pair for pair in headers]
        lines.append(b"\r\n" if body is None else b"Content-Length: %d\r\n\r\n" % len(body))
        if body is not None and len(body) <= TOGETHER:
            lines.append(body)
            body = None
        self._transport.write(b"".join(lines))
        if body is not None:
            self._transport.write(body)
        while not self._begun:
            await self._more()

    async def read(self) -> bytes:
        """Return the next bytes of the answer, as many as are here; none at its end."""
        while not self._parts:
            if self.complete:
                return b""
            await self._more()
        parts = self._parts
        self._parts, self._waiting = [], 0
        if self.paused:
            self.paused, self.heard = False, self._connections.now()
            self._transport.resume_reading()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def pass_to(self, sink: ChunkSink) -> None:
        """Hand what comes to ``sink``, without a turn of the caller's task for each piece, until it takes no more or the answer
        is about to end: there is something to ``read`` then, or it has failed.
        """
        if self._parts or self.complete:
            return
        self._sink = sink
        try:
            await self._more()
        finally:
            self._sink = None

    @property
    def alive(self) -> bool:
        """Return true if it isn't closed, and isn't about to be."""
        return not self._transport.is_closing()

    def release(self) -> None:
        """Keep the connection, whose answer was read, for another request if possible."""
        self.busy = False
        if self.complete and self._reusable and not self._surplus and self.alive and not self._unsent():
            self._connections.keep(self)
        else:
            self.close()

    def _unsent(self) -> bool:
        """Return true if the engine has answered before it took all of the request: the next one would wait behind the rest."""
        return bool(self._transport.get_write_buffer_size())

    def close(self) -> None:
        """Close the connection, which ends the engine's work on the request."""
        self.busy = False
        self.aborted = True
        if self._transport is not None:
            self._transport.abort()

    # -- for the event loop -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.heard = self._connections.now()
        if not self.busy or self.complete:
            self.close()  # more than was asked for: no request that it could answer
            return
        # Of the body the parser hands on what it reads; heads and trailers it keeps, so they are bounded.
        self._head += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("it changed to another protocol")
        except httptools.HttpParserError as error:
            self._fail(f"its answer can't be read: {error}"[:200])
        if self._head > HEAD_BYTES and not self.complete:
            self._fail("its answer has too long trailers" if self._begun else "the head of its answer is too long")
        sink, parts = self._sink, self._parts
        if sink is not None and parts and not self._failure and not self.complete:
            if sink(parts[0] if len(parts) == 1 else b"".join(parts)):
                self._parts, self._waiting = [], 0
                return
            self._sink = None  # the reader takes this first
        if self._waiting > HIGH_WATER and not self.paused and not self.complete:
            # Only where a reader has to take it, which lets the engine go on: over TLS more may come at once than may wait.
            self.paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.forget(self)
        if self._until_closed and error is None and not self._failure and not self.aborted:
            self.complete = True
        elif not self.complete:
            self._failure = self._failure or CLOSED
        self._parser = None  # it refers to us
        untie(self._transport)
        self._wake()

    def silent(self) -> None:
        """Fail because nothing arrived for too long."""
        self._fail("it was silent for too long")

    # -- for the parser ---------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._surplus = self._surplus or self.complete

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._begun:  # behind the body it is a trailer, which is no header
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self.complete:
            self._surplus = True  # an answer too many
            return
        if 100 <= status < 200:
            return
        self.status, self._begun = status, True
        kind: bytes | None = None
        ends = status in (204, 304)
        for name, value in self.headers:
            name = name.lower()
            if name in (b"content-length", b"transfer-encoding"):
                ends = True
            elif name == b"content-type" and kind is None:
                kind = value.partition(b";")[0].strip().lower()
        self.content_type, self._until_closed = kind or b"", not ends

    def on_body(self, data: bytes) -> None:
        self._head = 0
        if not self.complete:
            self._parts.append(data)
            self._waiting += len(data)

    def on_message_complete(self) -> None:
        if not self._begun:
            self.headers = []  # 100 Continue: the answer follows
            return
        self.complete = True
        self._reusable = bool(self._parser.should_keep_alive())

    # -- inside -----------------------------------------------------------------------------------------------------

    async def _more(self) -> None:
        """Wait until something came."""
        if self._connections.closed:
            raise asyncio.CancelledError  # the gateway didn't wait for us
        if self._failure:
            raise EngineFailed(self._failure)
        self._reader = self._connections.loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake(self) -> None:
        reader = self._reader
        if reader is not None and not reader.done():
            reader.set_result(None)

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self.close()
        self._wake()


class EngineConnections:
    """All connections of a gateway to its engines."""

    def __init__(self, connect_seconds: float, silent_seconds: float) -> None:
        """On the loop that will use them."""
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time
        self.closed = False
        self.on_lost: Callable[[EngineAddress], None] | None = None
        """Called where an engine has closed the last connection to it, though no request was in flight on it."""
        self._connect_seconds = connect_seconds
        self._silent_seconds = silent_seconds
        self._idle: dict[EngineAddress, list[EngineConnection]] = {}
        self._all: set[EngineConnection] = set()
        self._tls: ssl.SSLContext | None = None
        self._every = min(1.0, silent_seconds / 4)
        self._timer = self.loop.call_later(self._every, self._look)

    async def take(self, address: EngineAddress) -> EngineConnection:
        """Return a connection that is the caller's until it is released or closed. Raises ``EngineFailed``."""
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            if connection.alive and connection.heard + IDLE_SECONDS > self.now():
                connection.busy, connection.heard = True, self.now()
                return connection
            connection.close()
        return await self._open(address)

    async def get(
        self, address: EngineAddress, path: bytes, headers: Sequence[tuple[bytes, bytes]]
    ) -> tuple[int, bytes]:
        """Return the status and body of an engine's answer to a GET; of a long body no more than ``LOOKED_AT`` bytes, about.
        Raises ``EngineFailed``.
        """
        answer = await self.take(address)
        try:
            await answer.ask("GET", path, headers, None)
            reply = answer.status, await read_up_to(answer, LOOKED_AT)
        except BaseException:
            answer.close()
            raise
        answer.release()
        return reply

    def keep(self, connection: EngineConnection) -> None:
        """Keep a connection that is free again."""
        connection.heard = self.now()
        self._idle.setdefault(connection.address, []).append(connection)

    def forget(self, connection: EngineConnection) -> None:
        """Forget a connection that was closed."""
        self._all.discard(connection)
        address = connection.address
        idle = self._idle.get(address)
        if idle and connection in idle:
            idle.remove(connection)
            # Idle ones are closed by us, before engines do it: so another process may answer there soon.
            by_engine = not connection.aborted and all(other.address != address for other in self._all)
            if by_engine and self.on_lost is not None:
                self.on_lost(address)

    def close(self) -> None:
        """End all of them; those who wait for an answer are cancelled."""
        self.closed = True
        self._timer.cancel()
        for connection in list(self._all):
            connection.close()

    async def _open(self, address: EngineAddress) -> EngineConnection:
        tls = None
        if address.tls:
            tls = self._tls = self._tls or ssl.create_default_context()
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await self.loop.create_connection(
                    lambda: EngineConnection(self, address), address.host, address.port, ssl=tls
                )
        except TimeoutError:
            raise EngineFailed("it can't be reached in time", reached=False) from None
        except OSError as error:
            raise unreachable(error) from None
        self._all.add(connection)
        connection.busy, connection.heard = True, self.now()
        return connection

    def _look(self) -> None:
        """Close connections that were idle or silent for too long. One timer for all: one per request would cost too much."""
        now = self.now()
        for connection in list(self._all):
            if connection.busy:
                if not connection.paused and connection.heard + self._silent_seconds <= now:
                    connection.silent()
            elif connection.heard + IDLE_SECONDS <= now:
                connection.close()
        for address in [address for address, idle in self._idle.items() if not idle]:
            del self._idle[address]
        self._timer = self.loop.call_later(self._every, self._look)


async def read_up_to(answer: EngineConnection, most: int, room: Room | None = None) -> bytes:
    """Return an engine's answer, or its first ``most`` bytes and a little more; less if there is no ``room`` for more."""
    first = await answer.read()
    if answer.complete or not first:
        return first
    parts, size = [first], len(first)
    if room is not None:
        room.hold(size)
    try:
        while size < most and (room is None or room.has_room(HIGH_WATER)):
            part = await answer.read()
            if not part:
                break
            parts.append(part)
            size += len(part)
            if room is not None:
                room.hold(len(part))
    finally:
        if room is not None:
            room.hold(-size)
    return b"".join(parts)
