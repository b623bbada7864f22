"""How requests are read and answers written, for every server here: heads of bounded length, and few writes.

Uvicorn bounds heads only while they come in pieces and only with h11, so all others are counted here: whole ones before the
application sees them, unfinished ones while they come in. It writes the head of an answer and its body apart, and a system
call costs more than all else that a short answer takes: what is written in one turn of the event loop leaves together.
"""

import re
from itertools import chain
from typing import Any

import msgspec

from kvyard.server.garbage import untie
from kvyard.server.http import JSON, LOST, TRANSPORT, WHOLE, Refusal, openai_error, send_response

HEADER_BYTES = 64 << 10
"""What the head of a request may have."""
HEAD_SECONDS = 30.0
"""Until a head that was begun, or the first one of a connection, has to be here."""
STUCK_SECONDS = 120.0
"""How long a client may leave an answer unread: one that reads nothing would hold an engine for ever."""
_UPGRADE = re.compile(rb"(?i)(\r\nconnection:(?:[^\r\n]*,)?[ \t]*)upgrade(?=[ \t]*[,\r]|\Z)")


def bounded(app: Any) -> Any:
    """``app`` behind a look at the size of headers."""
    status, problem = openai_error(Refusal(431, f"headers are longer than {HEADER_BYTES} bytes", fix="send less"))
    body, headers = msgspec.json.encode(problem), [(b"content-type", JSON.encode()), (b"connection", b"close")]

    async def outer(scope: Any, receive: Any, send: Any) -> None:
        size = sum(map(len, chain.from_iterable(scope["headers"])))
        if size + len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"") > HEADER_BYTES:
            await send_response(send, status, headers, body)
        else:
            await app(scope, receive, send)

    return outer


def without_upgrade(data: bytes) -> bytes:
    """A head that asks for no other protocol. Java's client asks for HTTP/2 with every first request, which may be ignored; but
    the parser takes it for granted, and the body for something else.
    """
    end = data.find(b"\r\n\r\n")
    head = data if end < 0 else data[:end]
    return _UPGRADE.sub(rb"\1x-not-now", head) + data[len(head) :]


def protocol() -> Any:
    """What uvicorn is to read requests with: httptools, with unfinished heads bounded; or else h11, which has its own bound."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    import asyncio

    class Together:
        """A transport that keeps the head of an answer until the end of the event loop's turn, so that it leaves with what
        follows. Chunks of a stream whose head is gone leave at once.
        """

        def __init__(self, inner: asyncio.Transport) -> None:
            self._inner = inner
            self._waiting: list[bytes] = []
            self.paused = False
            """Whether the client is slower than what is written."""
            self._soon = asyncio.get_running_loop().call_soon

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def write(self, data: bytes) -> None:
            waiting = self._waiting
            if waiting:
                waiting.append(data)
            elif data.startswith(b"HTTP/"):
                waiting.append(data)
                self._soon(self.flush)
            elif not self._inner.is_closing():
                self._inner.write(data)

        def write_chunk(self, data: bytes) -> bool:
            """See ``chunk_writer``."""
            if self.paused or self._inner.is_closing():
                return False
            self.write(b"%x\r\n%b\r\n" % (len(data), data))
            return True

        def flush(self) -> None:
            waiting = self._waiting
            if waiting and not self._inner.is_closing():
                self._waiting = []
                self._inner.write(waiting[0] if len(waiting) == 1 else b"".join(waiting))

        def close(self) -> None:
            self.flush()
            self._inner.close()

        def untie(self) -> None:
            untie(self._inner)

        def abort(self) -> None:
            self.flush()  # what was written before goes out before the end, as without us
            self._inner.abort()

    class BoundedProtocol(HttpToolsProtocol):
        """Cuts clients that send a head without end, or none, or don't read."""

        late: asyncio.TimerHandle | None = None
        """Runs out where a head takes too long."""
        stuck: asyncio.TimerHandle | None = None
        """Runs out where an answer isn't read."""
        head = 0
        """Bytes that came since the last request was complete; where its head is read already they don't count."""
        reading_body = False
        idling: asyncio.TimerHandle | None = None
        """Runs out where no request may have come for too long. It isn't set again for each: that costs more than it says."""
        idle_since = 0.0
        lost: set[Any]
        """Called where the client hangs up: cheaper than a task that waits for it."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.lost = set()
            self.transport = Together(transport)  # type: ignore[assignment]
            self.late = self.loop.call_later(HEAD_SECONDS, transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            self.in_time()
            for timer in (self.stuck, self.idling):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)
            for callback in list(self.lost):
                callback()
            self.transport.untie()  # type: ignore[attr-defined]

        def in_time(self) -> None:
            if self.late is not None:
                self.late.cancel()
                self.late = None

        def pause_writing(self) -> None:
            super().pause_writing()
            self.transport.paused = True  # type: ignore[attr-defined]
            if self.stuck is None:
                self.stuck = self.loop.call_later(STUCK_SECONDS, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self.transport.paused = False  # type: ignore[attr-defined]
            if self.stuck is not None:
                self.stuck.cancel()
                self.stuck = None

        def data_received(self, data: bytes) -> None:
            if not self.reading_body:
                # Some clients end a body with an empty line, which begins no head.
                if self.head or data.lstrip(b"\r\n"):
                    self.head += len(data)
                end = data.find(b"\r\n\r\n", 0, HEADER_BYTES)
                if data.find(b"pgrade", 0, end if end >= 0 else HEADER_BYTES) >= 0:
                    data = without_upgrade(data)
            super().data_received(data)
            # A long body in the same piece as its head is no long head: that was read by then.
            if self.head and not self.reading_body:
                if self.head > 2 * HEADER_BYTES:
                    self.send_400_response("The head of this request is too long.")
                elif self.late is None:
                    self.late = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

        def on_message_begin(self) -> None:
            self.reading_body = False
            super().on_message_begin()
            # For answers that have to end without their proper end, and for streams.
            self.scope[TRANSPORT] = self.transport  # type: ignore[literal-required]
            self.scope[LOST] = self.lost  # type: ignore[literal-required]

        def on_headers_complete(self) -> None:
            self.reading_body, self.head = True, 0
            self.in_time()
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self.reading_body, self.head = False, 0
            self.scope[WHOLE] = True  # type: ignore[literal-required]
            super().on_message_complete()

        def on_response_complete(self) -> None:
            if self.pipeline or self.transport.is_closing():
                super().on_response_complete()
                return
            self.server_state.total_requests += 1
            self.flow.resume_reading()
            self.idle_since = self.loop.time()
            if self.idling is None:
                self.idling = self.loop.call_later(self.timeout_keep_alive, self.look_whether_idle)

        def look_whether_idle(self) -> None:
            self.idling = None
            if self.head or not self.cycle.response_complete:
                return  # a request is here or on its way; its answer sets this again
            # What is left of a body that was refused unread may never come: that is no request.
            left = self.idle_since + self.timeout_keep_alive - self.loop.time()
            if left > 0:
                self.idling = self.loop.call_later(left, self.look_whether_idle)
            else:
                self.timeout_keep_alive_handler()

    return BoundedProtocol
