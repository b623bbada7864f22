"""The outlet: a PUB socket for the stream and a ROUTER that answers for its past. Owned by one thread.

Sending never waits. A subscriber that doesn't keep up loses batches at its high-water mark and sees a gap; one that reads a
replay slowly gets it in pieces, between the batches of the others, and is dropped only if it stops reading altogether.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from kvyard.clock import SECOND, WallClock
from kvyard.events.transport.archive import Archive
from kvyard.events.transport.endpoint import at_rank, is_bound
from kvyard.events.transport.frames import Frame
from kvyard.events.transport.zeromq import Waker, attach, require

SLICE = 64
"""Messages of one answer before another gets its turn."""
MAX_ANSWERS = 256
STUCK = 60 * SECOND


class OutletCounters(msgspec.Struct):
    """What went out and what was asked."""

    sent: int = 0
    sent_bytes: int = 0
    requests: int = 0
    malformed_requests: int = 0
    refused_requests: int = 0
    """Too many at once."""
    abandoned_answers: int = 0
    """The asker left, or stopped reading."""


class _Unsent:
    """What is left of an answer."""

    __slots__ = ("client", "messages", "moved", "waiting")

    def __init__(self, client: bytes, messages: Iterator[list[bytes]], now: int) -> None:
        self.client = client
        self.messages = messages
        self.waiting: list[bytes] | None = None
        self.moved = now


class Outlet:
    """The sockets of a publisher. ``open`` may be called by one thread and everything after it by another."""

    def __init__(
        self,
        endpoint: str,
        archive: Archive,
        *,
        replay: str | None = None,
        rank: int = 0,
        hwm: int = 100_000,
        bind: bool | None = None,
        counts_subscribers: bool = False,
    ) -> None:
        """Nothing is opened yet. ``bind`` says whether the stream's address is bound or connected to, where that isn't for the
        address to say. Raises ``KvyardError`` for endpoints that ``rank`` can't have.
        """
        self.archive = archive
        self.counters = OutletCounters()
        self.endpoint = at_rank(endpoint, rank)
        """Where the stream is; with the port that was found for port 0, once open."""
        self.replay_endpoint = None if replay is None else at_rank(replay, rank)
        self.subscribers = 0
        """How many there are, as of the last ``serve``; only where they are counted."""
        self._hwm = hwm
        self._bind = bind
        self._counts_subscribers = counts_subscribers
        self._clock = WallClock()
        self._pub: Any = None
        self._router: Any = None
        self._answers: deque[_Unsent] = deque()

    def open(self) -> None:
        """Bind or connect. Raises ``KvyardError`` without pyzmq, or where an address can't be had; then nothing is open."""
        zmq = require()
        context = zmq.Context.instance()
        try:
            self._pub = context.socket(zmq.XPUB if self._counts_subscribers else zmq.PUB)
            if self._counts_subscribers:
                self._pub.setsockopt(zmq.XPUB_VERBOSER, 1)
            self._pub.setsockopt(zmq.SNDHWM, self._hwm)
            self.endpoint = attach(
                self._pub, self.endpoint, is_bound(self.endpoint) if self._bind is None else self._bind
            )
            if self.replay_endpoint is not None:
                self._router = context.socket(zmq.ROUTER)
                # Without this a full queue drops replies without a word.
                self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self.replay_endpoint = attach(self._router, self.replay_endpoint, bind=True)
        except BaseException:
            self.close(linger=0)
            raise

    def send(self, frame: Frame) -> None:
        """Publish ``frame`` to all subscribers."""
        self.send_parts(frame.parts())

    def send_parts(self, parts: list[bytes]) -> None:
        """Publish a message that may be no batch at all."""
        self._pub.send_multipart(parts)
        self.counters.sent += 1
        self.counters.sent_bytes += len(parts[-1])

    def serve(self) -> bool:
        """Take in requests and send a slice of every answer under way. Returns whether anything moved."""
        if self._counts_subscribers:
            self._count_subscribers()
        if self._router is None:
            return False
        moved = self._take_requests()
        for _ in range(len(self._answers)):
            answer = self._answers.popleft()
            sent = self._send_slice(answer)
            moved |= sent > 0
            if sent >= 0:
                self._answers.append(answer)
        return moved

    @property
    def busy(self) -> bool:
        """Whether an answer is under way."""
        return bool(self._answers)

    def wait(self, ms: int, waker: Waker, *more: Any) -> None:
        """Wait up to ``ms`` milliseconds for a request or subscription, for ``waker``, or for ``more`` sockets."""
        zmq = require()
        own = [self._router] if self._router is not None else []
        own += [self._pub] if self._counts_subscribers else []
        poller = zmq.Poller()
        for socket in (*own, *more, waker.fileno()):
            poller.register(socket, zmq.POLLIN)
        poller.poll(ms)
        waker.rest()

    def close(self, linger: float = 1.0) -> None:
        """Close the sockets; what was sent has ``linger`` seconds to leave. Closing twice does nothing more."""
        self._answers.clear()
        for socket in (self._pub, self._router):
            if socket is not None:
                socket.close(linger=round(linger * 1000))
        self._pub = self._router = None

    def _count_subscribers(self) -> None:
        zmq = require()
        while True:
            try:
                said = self._pub.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.subscribers += {b"\x01": 1, b"\x00": -1}.get(said[:1], 0)

    def _take_requests(self) -> bool:
        zmq = require()
        taken = False
        while True:
            try:
                parts = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return taken
            taken = True
            self.counters.requests += 1
            if len(parts) != 3 or parts[1]:
                self.counters.malformed_requests += 1
            elif len(self._answers) >= MAX_ANSWERS:
                self.counters.refused_requests += 1
            else:
                self._answers.append(_Unsent(parts[0], self.archive.answer(parts[2]), self._clock.now()))

    def _send_slice(self, answer: _Unsent) -> int:
        """How many messages of ``answer`` left; -1 where none will follow."""
        zmq = require()
        for sent in range(SLICE):
            message = answer.waiting or next(answer.messages, None)
            if message is None:
                return -1
            answer.waiting = message
            try:
                self._router.send_multipart([answer.client, *message], zmq.NOBLOCK)
            except zmq.Again:
                if sent or self._clock.now() - answer.moved < STUCK:
                    return sent
                self.counters.abandoned_answers += 1
                return -1
            except zmq.ZMQError:  # the asker is gone
                self.counters.abandoned_answers += 1
                return -1
            answer.waiting = None
            answer.moved = self._clock.now()
        return SLICE
