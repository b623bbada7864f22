"""A process's end of the channel: messages to the hub and the other processes, and requests to them.

Messages wait, within a bound, while the hub doesn't read. Beyond that bookings are left out, and all are sent again later;
lines of the access log and of recordings are left out for good.
"""

import asyncio
import itertools
import logging
import socket
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from kvyard.server.gateway.processes.frames import ALL, HUB, LOSSY, WRITTEN, FrameKind, FrameReader, frame

log = logging.getLogger(__name__)

MOST_WAITING = 16 << 20
"""Bytes that wait for the hub to read them."""
PATIENCE = 0.5
"""Seconds that other processes have to answer."""
HUB_PATIENCE = 3.0
"""Seconds that the hub has: beyond that it is taken to hang."""

Heard: TypeAlias = Callable[[int, bytes], None]
"""Called with who sent a frame, and its body."""
Answering: TypeAlias = Callable[[bytes], bytes]

encode = msgspec.msgpack.Encoder().encode
_question = msgspec.msgpack.Decoder(tuple[int, str, bytes]).decode
_reply = msgspec.msgpack.Decoder(tuple[int, bytes]).decode


class Channel(asyncio.Protocol):
    """For one event loop."""

    def __init__(self, end: socket.socket, number: int, processes: int) -> None:
        """``number`` is this process's, of ``processes``."""
        self.number = number
        self.processes = processes
        self.others: set[int] = set()
        """Processes that are there besides this one."""
        self.heard: dict[FrameKind, Heard] = {}
        """Handlers of frames, by kind."""
        self.answers: dict[str, Answering] = {}
        """Handlers of other processes' requests, by name."""
        self.on_lost: Callable[[], None] | None = None
        """Called where the parent is gone."""
        self.lost_frames = 0
        """Frames lost since everything was last sent."""
        self._end = end
        self._reader = FrameReader()
        self._transport: Any = None
        self._asked: dict[int, tuple[asyncio.Future[Any], set[int], dict[int, bytes]]] = {}
        """By number: who waits, for whose answers, and those that came."""
        self._numbers = itertools.count(1)

    async def open(self) -> None:
        """Begin to receive. Raises ``OSError``."""
        self._end.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=self._end)

    def close(self) -> None:
        """Close after waiting messages are sent."""
        if self._transport is not None:
            self.on_lost = None
            self._transport.close()

    # -- telling and asking ---------------------------------------------------------------------------------------------

    def send(self, kind: FrameKind, peer: int, body: bytes = b"") -> bool:
        """Send to the hub, one process or all others. Returns true if it was sent; some kinds aren't if too much waits."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        if (kind in LOSSY or kind in WRITTEN) and transport.get_write_buffer_size() > MOST_WAITING:
            self.lost_frames += 1
            return False
        transport.write(frame(kind, peer, body))
        return True

    @property
    def drained(self) -> bool:
        """Return true if no message waits."""
        return self._transport is not None and self._transport.get_write_buffer_size() == 0

    async def ask_hub(self, subject: str, body: bytes = b"", seconds: float | None = None) -> bytes:
        """Return the hub's answer. Raises ``ConnectionError`` if it is gone, or doesn't answer in time."""
        answers = await self._ask(subject, body, {HUB}, HUB_PATIENCE if seconds is None else seconds)
        if HUB not in answers:
            raise ConnectionError("the parent process doesn't answer")
        return answers[HUB]

    async def ask_others(self, subject: str) -> dict[int, bytes]:
        """Return the answers of all other processes that answer in time, by number."""
        return await self._ask(subject, b"", set(self.others), PATIENCE) if self.others else {}

    async def _ask(self, subject: str, body: bytes, whom: set[int], seconds: float) -> dict[int, bytes]:
        number = next(self._numbers)
        answers: dict[int, bytes] = {}
        waiting = asyncio.get_running_loop().create_future()
        self._asked[number] = waiting, whom, answers
        try:
            if not self.send(FrameKind.ASK, HUB if whom == {HUB} else ALL, encode((number, subject, body))):
                return answers
            async with asyncio.timeout(seconds):
                await waiting
        except TimeoutError:
            pass
        finally:
            del self._asked[number]
        return answers

    # -- hearing --------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        for waiting, _, _ in self._asked.values():
            if not waiting.done():
                waiting.set_result(None)
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        for kind, peer, body in self._reader.feed(data):
            try:
                if kind is FrameKind.ANSWER:
                    self._answered(peer, body)
                elif kind is FrameKind.ASK:
                    self._answer(peer, body)
                else:
                    self._noted(kind, body)
                    heard = self.heard.get(kind)
                    if heard is not None:
                        heard(peer, body)
            except Exception:
                # A fault of ours: it costs this frame.
                log.exception("a frame of kind %s from process %d can't be used", kind.name, peer)

    def _noted(self, kind: FrameKind, body: bytes) -> None:
        if kind is FrameKind.JOINED:
            self.others.add(body[0])
        elif kind is FrameKind.GONE:
            self.others.discard(body[0])
            for waiting, whom, answers in self._asked.values():
                whom.discard(body[0])
                if whom <= answers.keys() and not waiting.done():
                    waiting.set_result(None)

    def _answer(self, peer: int, body: bytes) -> None:
        number, subject, asked = _question(body)
        answering = self.answers.get(subject)
        answer = b"" if answering is None else answering(asked)
        self.send(FrameKind.ANSWER, peer, encode((number, answer)))

    def _answered(self, peer: int, body: bytes) -> None:
        number, answer = _reply(body)
        asked = self._asked.get(number)
        if asked is not None:
            waiting, whom, answers = asked
            answers[peer] = answer
            if whom <= answers.keys() and not waiting.done():
                waiting.set_result(None)
