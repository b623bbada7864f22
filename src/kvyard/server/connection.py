"""A client's connection: it reads requests, has them answered one after the other, and limits the memory that a client takes.

Only here bytes of a client arrive and its disconnect is noticed. Heads, trailers and pipelined
requests are bounded here, bodies by the application's ``Bounds``, and all of it together by its ``HeldBytes``, with answers
that aren't read and connections themselves. A hang-up cancels the task of a request whose operation is
``abandoned_with_client``, at whatever stage it is.

It is built on httptools' parser and asyncio's protocols alone: general servers read ahead of answers that nobody takes, and
have no public place to bound that.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol
from urllib.parse import unquote

from kvyard.errors import KvyardError
from kvyard.server.held import CONNECTION_BYTES, TLS_BYTES, HeldBytes
from kvyard.server.http import Bounds, Refusal, openai_error_response
from kvyard.server.request import HttpRequest
from kvyard.server.transports import untie

try:
    import httptools
except ImportError:
    raise KvyardError("serving needs httptools: pip install 'kvyard[server]'") from None

log = logging.getLogger(__name__)

HEADER_BYTES = 64 << 10
"""Limit of a request's head, and of the trailers behind a chunked body."""
HEAD_SECONDS = 30.0
"""Until a head that was begun, or the first one of a connection, has to be complete."""
STUCK_SECONDS = 120.0
"""Seconds for which a client may leave an answer unread: one that reads nothing would hold an engine for ever."""
LINGER_SECONDS = 1.0
"""Seconds for which a refused client may go on sending: closing at once would take the answer from it."""
HEADERS = 256
"""Limit of the number of a request's headers."""
HEAD_TOO_LONG = f"headers are longer than {HEADER_BYTES} bytes, or more than {HEADERS}"
HEADER_OVERHEAD = 128
"""Bytes that the objects of one header take beside its text."""
REQUEST_OVERHEAD = 1 << 10
"""Bytes that the objects of a request take beside its head and body."""
PIPELINED_BYTES = 64 << 10
PIPELINED_REQUESTS = 32
"""Limits of what may follow a request before it is answered. A client that sends more gets the answers so far, and has to
connect again."""


class RequestHandler(Protocol):
    """Answers requests."""

    bounds: Bounds
    held: HeldBytes

    def __call__(self, request: HttpRequest) -> Awaitable[None]: ...


class ServedConnection(Protocol):
    """A connection as its server sees it."""

    transport: Any
    request: HttpRequest | None

    def shutdown(self) -> None: ...
    def cut(self) -> None: ...
    def abort(self) -> None: ...


class ServerState:
    """State that the connections of one server share."""

    def __init__(self, app: RequestHandler, keep_alive_seconds: float) -> None:
        self.app = app
        self.bounds = app.bounds
        self.held = app.held
        self.keep_alive_seconds = keep_alive_seconds
        self.ending = False
        """True once connections are to close after the request they have."""
        self.connections: set[ServedConnection] = set()
        self.on_idle: Callable[[], None] = lambda: None
        """Called where the last connection has gone."""

    def left(self, connection: ServedConnection) -> None:
        """Note that a connection was closed."""
        self.connections.discard(connection)
        if not self.connections:
            self.on_idle()


class ClientConnection(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, state: ServerState, below: asyncio.BaseTransport | None = None) -> None:
        """``below`` is the transport under that of TLS."""
        self._state = state
        self._below = below
        self._loop = asyncio.get_running_loop()
        self.transport: Any = None
        self.request: HttpRequest | None = None
        """The request that is being answered."""
        self._parser: Any = httptools.HttpRequestParser(self)
        self._arriving: HttpRequest | None = None
        """The request whose body is being read."""
        self._queue: deque[HttpRequest] = deque()
        """Pipelined requests, in order."""
        self._held = b""
        """Bytes behind the latest request, not parsed yet."""
        self._overrun = False
        """True where a client pipelined more than it may: nothing more is read."""
        self._refused = False
        """True once a request was refused here, which ends the connection."""
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        """Bytes of this head, or of the trailers behind it."""
        self._head_holds = 0
        """Bytes that are counted for a head in progress, its objects included."""
        self._parser_holds = 0
        """Bytes that are counted for what is inside the parser."""
        self._unread = 0
        """Bytes that are counted for answers that the client hasn't read."""
        self._unparsed = 0
        """Bytes since the parser last found something: the rest is inside the parser."""
        self._in_head = False
        """True between the first byte of a head and its end."""
        self._cut_head = False
        """True if headers were dropped from a head that asks for another protocol."""
        self._idle_since = 0.0
        self._idling: asyncio.TimerHandle | None = None
        """Runs out if no request came for too long. It isn't set again for each request: that would cost too much."""
        self._late: asyncio.TimerHandle | None = None
        """Runs out where a head takes too long."""
        self._stuck: asyncio.TimerHandle | None = None
        """Runs out where an answer isn't read."""
        self._closing: asyncio.TimerHandle | None = None
        """Runs out where the rest of an answer isn't read after the connection was closed."""
        self._lingering: asyncio.TimerHandle | None = None
        """Runs out where a client that was refused goes on sending."""
        self.writable: asyncio.Event | None = None
        """Set again once the client has read; ``None`` while it reads as fast as is written."""

    # -- for the event loop ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        state = self._state
        state.connections.add(self)
        if not state.held.admit(self, CONNECTION_BYTES + (TLS_BYTES if self._below is not None else 0)):
            self.abort()
            return
        # What the system doesn't take of an answer is counted from its first byte. Not with a limit of 0: asyncio's TLS would
        # pause at each write, and stay so.
        for layer in self._transports():
            layer.set_write_buffer_limits(1, 0)
        self._late = self._loop.call_later(HEAD_SECONDS, self._give_up, "late")

    def connection_lost(self, error: Exception | None) -> None:
        for timer in (self._late, self._stuck, self._idling, self._closing, self._lingering):
            if timer is not None:
                timer.cancel()
        self._parser = None  # it refers to us
        self._overrun = True
        self._hold(b"")
        self._hold_head(0)
        self._unparsed = 0
        self._hold_unparsed()
        self._hold_unread(0)
        self._state.held.leave(self)
        for request in (*self._queue, *((self._arriving,) if self._arriving is not None else ())):
            if request is not self.request:
                request.release()
        self._queue.clear()
        self._arriving = None
        self._state.left(self)
        if self.request is not None:
            self.request.disconnected()
        if self.writable is not None:
            self.writable.set()
        untie(self._below or self.transport)

    def pause_writing(self) -> None:
        if self.writable is None:
            self.writable = asyncio.Event()
        self._hold_unread(self._unread_bytes())
        if not self._state.held.has_room(0):
            self._give_up("unread")
        elif self._stuck is None:
            self._stuck = self._loop.call_later(STUCK_SECONDS, self._give_up, "unread")

    def resume_writing(self) -> None:
        self._hold_unread(0)
        if self.writable is not None:
            self.writable.set()
            self.writable = None
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None
        if self.request is None:
            self._next()

    def eof_received(self) -> None:
        """The client sends no more, and asyncio closes once it has read what is written: it gets no further answer."""
        if self.request is not None:
            self.request.disconnected()
        self._bound_closing()

    def data_received(self, data: bytes) -> None:
        if self._overrun:
            return
        if self._arriving is None and self._busy():
            # Not parsed before the answer is out, but read on: this is how a hang-up is noticed.
            if len(self._held) + len(data) > PIPELINED_BYTES or not self._state.held.has_room(len(data)):
                self._overrun_by("pipelined")
                self._hold(b"")
            else:
                self._hold(self._held + data)
            return
        self._feed(data)

    def _transports(self) -> tuple[Any, ...]:
        return (self.transport,) if self._below is None else (self.transport, self._below)

    def _unread_bytes(self) -> int:
        """Return bytes of answers that the system hasn't taken."""
        return sum(layer.get_write_buffer_size() for layer in self._transports())

    def _busy(self) -> bool:
        """True if what comes now has to wait for an answer, or for the client to read one."""
        return self.request is not None or bool(self._queue) or bool(self._held) or self.writable is not None

    # -- for the parser -------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._url, self._headers = b"", []
        self._head_bytes, self._unparsed, self._in_head = 0, 0, True
        if len(self._queue) >= PIPELINED_REQUESTS:
            self._overrun_by("pipelined")

    def on_url(self, url: bytes) -> None:
        self._unparsed = 0
        self._head_bytes += len(url)
        if self._head_bytes <= HEADER_BYTES:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._unparsed = 0
        self._head_bytes += len(name) + len(value) + 4
        # Behind the body it is a trailer, which is no header.
        if self._in_head and self._head_bytes <= HEADER_BYTES and len(self._headers) <= HEADERS:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._late is not None:
            self._late.cancel()
            self._late = None
        parser = self._parser
        if self._overrun or parser.should_upgrade():
            self._cut_head = self._head_too_long()
            return  # see ``_feed``
        version = parser.get_http_version()
        parsed = httptools.parse_url(self._url) if self._url else None
        path = "" if parsed is None else (parsed.path or b"").decode("ascii")
        request = HttpRequest(
            self,
            parser.get_method().decode("ascii"),
            unquote(path) if "%" in path else path,
            b"" if parsed is None else parsed.query or b"",
            self._headers,
            old=version == "1.0",
            keep_alive=bool(parser.should_keep_alive()),
            held=self._state.held,
        )
        refusal = self._head_refusal(version)
        holds = self._head_size() + REQUEST_OVERHEAD
        self._head_bytes = 0
        if self._head_holds:
            self._hold_head(0)
        if refusal is not None:
            self._refuse(request, *refusal)
            return
        if self.request is None and not self._queue and self.writable is None:
            self._start(request)
        elif self._state.held.has_room(holds):
            self._queue.append(request)
        else:
            self._overrun_by("pipelined")
            return
        request.hold(holds)
        self._arriving = request

    def _head_refusal(self, version: str) -> tuple[int, str] | None:
        """Return why a head that is complete isn't taken, as status and sentence."""
        if self._head_too_long():
            return 431, HEAD_TOO_LONG
        if version not in ("1.0", "1.1"):
            return 505, "this server speaks HTTP/1.1"
        hosts, coding = 0, b"chunked"
        for name, value in self._headers:
            if name == b"host":
                hosts += 1
            elif name == b"transfer-encoding" and coding == b"chunked":
                coding = value.lower()
        if version == "1.1" and hosts != 1:
            return 400, "a request has one Host header"
        if coding != b"chunked":
            return 501, "the only transfer coding that is read is chunked"
        return None

    def _head_too_long(self) -> bool:
        return self._head_bytes > HEADER_BYTES or len(self._headers) > HEADERS

    def _head_size(self) -> int:
        """Return bytes that a head takes so far, its objects included."""
        return self._head_bytes + HEADER_OVERHEAD * len(self._headers)

    def on_body(self, data: bytes) -> None:
        self._unparsed = 0
        if self._arriving is not None:
            self._arriving.add_body(data, self._state.bounds.body_bytes)

    def on_chunk_header(self) -> None:
        self._unparsed = 0

    def on_message_complete(self) -> None:
        self._head_bytes = self._unparsed = 0
        arrived, self._arriving = self._arriving, None
        if arrived is not None:
            arrived.body_complete()

    # -- requests -------------------------------------------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        self._unparsed += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._malformed(400, "this is no HTTP request")
            return
        if self._parser is None:
            return
        if self._unparsed != self._parser_holds:
            self._hold_unparsed()
        if self._in_head:
            self._hold_head(self._head_size())
        if self._unparsed > 2 * HEADER_BYTES or self._head_bytes > 2 * HEADER_BYTES:
            self._malformed(431, HEAD_TOO_LONG)
        elif self._in_head and not self._state.held.has_room(0):
            self._malformed(429, "requests in progress hold all the bytes they may")
        else:
            self._await_head()

    def _await_head(self) -> None:
        """Bound the time of a head in progress, once nothing before it is being answered."""
        if self._in_head and self._late is None and self.request is None and not self._queue:
            self._late = self._loop.call_later(HEAD_SECONDS, self._give_up, "late")

    def _hold_unparsed(self) -> None:
        self._state.held.bytes += self._unparsed - self._parser_holds
        self._parser_holds = self._unparsed

    def _hold_unread(self, size: int) -> None:
        self._state.held.bytes += size - self._unread
        self._unread = size

    def _overrun_by(self, reason: str) -> None:
        """Read nothing more of this client: it gets the answers so far."""
        if not self._overrun:
            self._overrun = True
            self._state.held.refused[reason] += 1

    def _give_up(self, reason: str) -> None:
        """End the connection without an answer."""
        self._state.held.refused[reason] += 1
        self.transport.abort()

    def _hold_head(self, size: int) -> None:
        self._state.held.bytes += size - self._head_holds
        self._head_holds = size

    def _hold(self, data: bytes) -> None:
        self._state.held.bytes += len(data) - len(self._held)
        self._held = data

    def _decline_upgrade(self, rest: bytes) -> None:
        """Have the request parsed as one that asks for no other protocol, which it may ignore. Java's client asks for HTTP/2
        with every first request; the parser takes that for granted, and the body for something else.
        """
        parser, self._parser = self._parser, httptools.HttpRequestParser(self)
        method = parser.get_method()
        if method == b"CONNECT" or self._overrun:
            self._malformed(405, "CONNECT isn't for this server")
            return
        if self._cut_head:
            self._malformed(431, HEAD_TOO_LONG)
            return
        self._hold_head(0)
        kept = [pair for pair in self._headers if pair[0] not in (b"connection", b"upgrade", b"http2-settings")]
        head = b"".join(
            [
                b"%b %b HTTP/%b\r\n" % (method, self._url, parser.get_http_version().encode()),
                *(b"%b: %b\r\n" % pair for pair in kept),
                b"\r\n",
            ]
        )
        self._feed(head + rest)

    def _start(self, request: HttpRequest) -> None:
        self.request = request
        self._state.held.silent.pop(self, None)
        request.task = self._loop.create_task(self._run(request))

    async def _run(self, request: HttpRequest) -> None:
        try:
            await self._state.app(request)
        except asyncio.CancelledError:
            if request.task is not None and not request.gone and not request.ending:
                raise
        finally:
            self._ended(request)

    def _ended(self, request: HttpRequest) -> None:
        """Note that a request ended, for any reason."""
        request.task = self.request = None
        request.close()
        if request.gone or self.transport.is_closing():
            return
        self._state.held.silent[self] = None
        if not request.finished:
            self.abort()
        elif not request.keep_alive or self._state.ending:
            self._close(linger=self._arriving is not None)
        else:
            self._next()

    def _next(self) -> None:
        """Go on with what was pipelined, once the client has read its answers."""
        if self.transport.is_closing() or self.writable is not None:
            return
        while self.request is None and self._arriving is None and not self._queue and self._held:
            data = self._held
            self._hold(b"")
            self._feed(data)
        if self.request is not None:
            return
        if self._queue:
            self._start(self._queue.popleft())
        elif self._overrun:
            self._close(linger=True)
        else:
            self._await_head()
            self._idle_since = self._loop.time()
            if self._idling is None:
                self._idling = self._loop.call_later(self._state.keep_alive_seconds, self._check_idle)

    def _check_idle(self) -> None:
        self._idling = None
        if self.request is not None or self._in_head:
            return  # a request is here or about to be; its answer sets this again
        # What is left of a body that was refused unread may never come: that is no request.
        left = self._idle_since + self._state.keep_alive_seconds - self._loop.time()
        if left > 0:
            self._idling = self._loop.call_later(left, self._check_idle)
        else:
            self._close()

    def _refuse(self, request: HttpRequest, status: int, error: str) -> None:
        """Answer a request that the application doesn't get to see, and close."""
        refused, self._overrun = self._refused, True
        if self.request is not None or refused:
            return  # the answer in progress comes first; then the connection closes
        self._refused = True
        self._state.held.refused[{431: "head", 429: "held"}.get(status, "malformed")] += 1
        request.keep_alive = False
        status, headers, body = openai_error_response(Refusal(status, error, fix="send less" if status == 431 else ""))
        request.respond(status, headers, body)
        request.release()
        self._close(linger=True)

    def _malformed(self, status: int, error: str) -> None:
        """Refuse what is no request, or none that was read to its head's end, or one whose body can't be read on."""
        self._overrun = True
        arriving = self._arriving
        if arriving is None:
            held = self._state.held
            self._refuse(HttpRequest(self, "", "", b"", [], old=False, keep_alive=False, held=held), status, error)
        elif arriving.finished:
            self._close(linger=True)  # it has its answer
        else:
            self._state.held.refused["malformed"] += 1
            arriving.body_malformed(error)

    # -- its end --------------------------------------------------------------------------------------------------------

    def _close(self, linger: bool = False) -> None:
        if not linger or self._state.ending:
            self.transport.close()
        else:
            self._overrun = True
            if self.transport.can_write_eof():  # not with TLS
                try:
                    self.transport.write_eof()
                except OSError:  # the client has just gone
                    self.abort()
                    return
            self._lingering = self._loop.call_later(LINGER_SECONDS, self.transport.close)
        self._bound_closing()

    def _bound_closing(self) -> None:
        """End the connection if the client doesn't read the rest: a transport that closes waits for that without limit."""
        if self._closing is None and self._unread_bytes():
            self._closing = self._loop.call_later(STUCK_SECONDS, self._give_up, "unread")

    def abort(self) -> None:
        """End the connection at once; what was written goes out if the client takes it now."""
        self.transport.abort()

    make_way = abort

    def shutdown(self) -> None:
        """Close, once the request that is being answered is."""
        if self.request is None and not self.transport.is_closing():
            self._close()

    def cut(self) -> None:
        """End the request that is being answered: the server can't wait any longer."""
        if self.request is not None:
            self.request.cut()
