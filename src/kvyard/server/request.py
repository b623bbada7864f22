"""A request of a client: its headers by name, its body as it arrives, and the response that is written to it."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from kvyard.clock import SECOND, WallClock
from kvyard.server.held import HeldBytes
from kvyard.server.http import Bounds, Refusal

if TYPE_CHECKING:
    from kvyard.server.connection import ClientConnection

Pairs = Sequence[tuple[bytes, bytes]]

_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}
_BODILESS = (204, 304)
SMALL_PART = 4096
"""Parts of a body below this, but for the first, are joined as they come: each would take more as an object than it has
bytes."""


class ClientGone(Exception):
    """The client hung up before its request was answered."""


class _Date:
    """The Date header, written once a second."""

    def __init__(self) -> None:
        self._clock = WallClock.since_epoch()
        self._second = -1
        self._line = b""

    def line(self) -> bytes:
        second = self._clock.now() // SECOND
        if second != self._second:
            from email.utils import formatdate

            self._second, self._line = second, f"date: {formatdate(second, usegmt=True)}\r\n".encode()
        return self._line


_date = _Date()


class HttpRequest(Mapping[str, str]):
    """One request. As a mapping it has its headers, by names in small letters; of one that comes twice the first counts."""

    __slots__ = (
        "_abandoned",
        "_arrived",
        "_body",
        "_chunked",
        "_connection",
        "_found",
        "_head",
        "_held",
        "_holds",
        "_malformed",
        "_no_room",
        "_old",
        "_size",
        "_too_long",
        "_waiting",
        "began",
        "ending",
        "finished",
        "gone",
        "keep_alive",
        "method",
        "more_headers",
        "on_end",
        "path",
        "query",
        "raw",
        "task",
    )

    def __init__(
        self,
        connection: "ClientConnection",
        method: str,
        path: str,
        query: bytes,
        headers: list[tuple[bytes, bytes]],
        *,
        old: bool,
        keep_alive: bool,
        held: HeldBytes,
    ) -> None:
        """``old``: it is of HTTP/1.0."""
        self.method = method
        self.path = path
        """Decoded, without the query."""
        self.query = query
        self.raw = headers
        """Headers as they came, but for names in small letters."""
        self.keep_alive = keep_alive
        self._abandoned = False
        """True if its task is cancelled where the client hangs up."""
        self.gone = False
        """True if the client hung up before the answer was complete."""
        self.ending = False
        """True if the server ends and can't wait for it."""
        self.began = False
        """True if the head of the answer was written."""
        self.finished = False
        """True if all of the answer was written."""
        self.more_headers: Pairs = ()
        """Headers that any answer to it has."""
        self.on_end: Callable[[HttpRequest], None] | None = None
        """Called once when the request is over, whichever way."""
        self.task: asyncio.Task[None] | None = None
        self._connection = connection
        self._old = old
        self._found: dict[str, str] | None = None
        self._body: list[bytes | bytearray] = []
        self._size = 0
        self._held = held
        self._holds = 0
        """Bytes that are counted for it."""
        self._arrived = self._too_long = False
        self._malformed = ""
        self._no_room = False
        self._waiting: asyncio.Future[None] | None = None
        self._head = b""
        """The head of the answer, until something follows it."""
        self._chunked = False

    # -- headers --------------------------------------------------------------------------------------------------------

    def _all(self) -> dict[str, str]:
        headers = self._found
        if headers is None:
            headers = self._found = {
                name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(self.raw)
            }
        return headers

    def get(self, name: str, default: Any = None) -> Any:
        headers = self._found
        return (self._all() if headers is None else headers).get(name.lower(), default)

    def __getitem__(self, name: str) -> str:
        return self._all()[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def drop_headers(self, names: Sequence[bytes]) -> None:
        """Go on as if these headers hadn't been sent."""
        self.raw, self._found = [pair for pair in self.raw if pair[0] not in names], None

    # -- its body -------------------------------------------------------------------------------------------------------

    async def body(self, bounds: Bounds) -> bytes:
        """Return the whole body. Raises ``Refusal`` for one that is too long or late, and ``ClientGone``."""
        if not self._stopped():
            await self._all_of_body(bounds)
        if self._too_long:
            raise self._too_long_refusal(bounds)
        if self._no_room:
            self.release()
            raise self._held.refusal(self.path, self._size)
        if self._malformed:
            raise Refusal(400, self._malformed, Connection="close")
        if not self._arrived:
            raise ClientGone
        parts, self._body = self._body, []
        only = parts[0] if len(parts) == 1 else None
        return only if type(only) is bytes else b"".join(parts)

    async def _all_of_body(self, bounds: Bounds) -> None:
        """Wait for the rest of the body, unless it can't be taken. Raises ``Refusal`` for one that is too long or late."""
        announced = self.get("content-length", "")
        if announced.isdecimal():
            if int(announced) > bounds.body_bytes:
                raise self._too_long_refusal(bounds)
            if not self._held.has_room(int(announced) - self._size):
                self._no_room = True
                return
        if self.get("expect", "").lower() == "100-continue" and not self._old:
            self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async with asyncio.timeout(bounds.body_seconds):
                while not self._stopped() and not self.gone:
                    await self._more()
        except TimeoutError:
            self._held.refused["late"] += 1
            raise Refusal(408, f"the body took longer than {bounds.body_seconds:g} s", Connection="close") from None

    def _stopped(self) -> bool:
        """True if nothing more of the body is waited for."""
        return self._arrived or self._too_long or self._no_room or bool(self._malformed)

    def refused(self, reason: str) -> None:
        """Count a refusal before the handler was asked; see ``held.REASONS``."""
        self._held.refused[reason] += 1

    def _too_long_refusal(self, bounds: Bounds) -> Refusal:
        self._held.refused["body"] += 1
        fix = "send less at once, or raise limits.body_bytes"
        return Refusal(413, f"the body is longer than {bounds.body_bytes} bytes", fix=fix, Connection="close")

    async def _more(self) -> None:
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def add_body(self, data: bytes, most: int) -> None:
        """Add a part of the body, of which ``most`` bytes are kept."""
        self._size += len(data)
        if self.finished or self._too_long or self._no_room:
            return
        self._too_long = self._size > most
        self._no_room = not self._held.has_room(len(data))
        if self._too_long or self._no_room:
            self.release()
            self._wake()
        else:
            self.hold(len(data))
            parts = self._body
            if not parts or len(data) >= SMALL_PART:
                parts.append(data)
            elif type(parts[-1]) is bytearray:
                parts[-1] += data
            else:
                parts.append(bytearray(data))

    def hold(self, size: int) -> None:
        """Count bytes that are held for it until it is over."""
        self._holds += size
        self._held.bytes += size

    def has_room(self, more: int) -> bool:
        """Return true if this many bytes more may be held."""
        return self._held.has_room(more)

    def release(self) -> None:
        """Release the bytes held for it."""
        self._body = []
        self._held.bytes -= self._holds
        self._holds = 0

    def body_complete(self) -> None:
        """Note that the body is complete."""
        self._arrived = True
        self._wake()

    def body_malformed(self, error: str) -> None:
        """Note that the rest of the body, and what follows it, can't be read."""
        self._malformed, self.keep_alive = error, False
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    # -- its answer -----------------------------------------------------------------------------------------------------

    def respond(self, status: int, headers: Pairs, body: bytes) -> None:
        """Answer with a body that is complete."""
        self._begin(status, headers, len(body))
        self.finished = True
        self._write(b"" if self.method == "HEAD" or status in _BODILESS else body)

    def start(self, status: int, headers: Pairs) -> None:
        """Begin an answer whose length isn't known; its head leaves with what is written next, or on the loop's next turn."""
        self._begin(status, headers, None)
        asyncio.get_running_loop().call_soon(self._flush)

    async def write(self, data: bytes) -> None:
        """Write a part of the answer, and wait while the client is slower. Raises ``ClientGone``."""
        writable = self._connection.writable
        while writable is not None and not self.gone:
            await writable.wait()
            writable = self._connection.writable
        if self.gone:
            raise ClientGone
        self._write_part(data)

    def write_now(self, data: bytes) -> bool:
        """Write a part unless the client is slower; returns whether it was written."""
        connection = self._connection
        transport = connection.transport
        if connection.writable is not None or transport.is_closing():
            return False
        if self._chunked and not self._head and self.method != "HEAD":
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            self._write_part(data)
        return True

    async def finish(self, data: bytes = b"") -> None:
        """End the answer, with a last part. Raises ``ClientGone``."""
        if data:
            await self.write(data)
        if self.gone:
            raise ClientGone
        self.finished = True
        self._write(b"0\r\n\r\n" if self._chunked and self.method != "HEAD" else b"")

    def abort(self) -> None:
        """End the connection without the answer's proper end."""
        self._abandoned = False  # it is we who hang up
        self._flush()
        self._connection.transport.close()

    def reset(self) -> None:
        """Like ``abort``, and drop what the client hasn't read yet."""
        self._abandoned = False
        self._connection.abort()

    def _write_part(self, data: bytes) -> None:
        if not data or self.method == "HEAD":
            return
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def _begin(self, status: int, headers: Pairs, length: int | None) -> None:
        self.began = True
        lines = [_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status, _date.line()]
        for name, value in headers:
            lines.append(b"%b: %b\r\n" % (name, value))
            if name == b"connection" and value.lower() == b"close":
                self.keep_alive = False
                lines.pop()
        lines += [b"%b: %b\r\n" % pair for pair in self.more_headers]
        if status in _BODILESS:
            pass
        elif length is not None:
            lines.append(b"content-length: %d\r\n" % length)
        elif self._old:
            self.keep_alive = False  # its end is the connection's
        else:
            self._chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        elif self._old:
            lines.append(b"connection: keep-alive\r\n")
        lines.append(b"\r\n")
        self._head = b"".join(lines)

    def _write(self, data: bytes) -> None:
        head, self._head = self._head, b""
        transport = self._connection.transport
        if not transport.is_closing() and (head or data):
            transport.write(head + data if head else data)

    def _flush(self) -> None:
        if self._head:
            self._write(b"")

    # -- its end --------------------------------------------------------------------------------------------------------

    def abandon_with_client(self) -> None:
        """Cancel its task from now on if the client disconnects. Raises ``ClientGone`` if it has."""
        if self.gone:
            raise ClientGone
        self._abandoned = True

    def disconnected(self) -> None:
        """Note that the connection was lost before the answer was complete."""
        self.gone = not self.finished
        self._wake()
        if self._abandoned and self.task is not None:
            self.task.cancel()

    def cut(self) -> None:
        """End the request: the server stops, and has waited long enough."""
        self.ending, self.keep_alive = True, False
        if self.task is not None:
            self.task.cancel("the server ends")

    def close(self) -> None:
        """Release the bytes held, and report that the request is over."""
        self.release()
        ended, self.on_end = self.on_end, None
        if ended is not None:
            ended(self)
