"""The outlet: a PUB socket for the stream and a ROUTER that answers for its past. Owned by one thread.

Sending never waits. A subscriber that doesn't keep up loses batches at its high-water mark and sees a gap; one that reads a
replay slowly gets it in pieces, between the batches of the others, and is dropped only if it stops reading altogether.

What it answers from is its archive: the last batches for short gaps, a mirror for everything else, and a digest over all
payloads, which tells a reader in eight bytes whether it has read what was sent. An answer is an iterator of messages, so a slow
reader's can be handed out piece by piece, and it stays the answer as of the moment it was asked for.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from types import TracebackType
from typing import Any, Self

import msgspec

from kvyard.clock import SECOND, WallClock
from kvyard.errors import KvyardError
from kvyard.events.mirror import Mirror, restates
from kvyard.events.transport import frames
from kvyard.events.transport.endpoint import at_rank, is_bound
from kvyard.events.transport.zeromq import Waker, attach, require, shared_context
from kvyard.events.types import Event, EventBatch, Stored
from kvyard.events.wire import Encoder

log = logging.getLogger(__name__)

PART_BLOCKS = 4096
"""Blocks after which a snapshot goes on in another message."""


class ArchiveCounters(msgspec.Struct):
    """Counters of requests."""

    replays: int = 0
    replayed_batches: int = 0
    heads: int = 0
    snapshots: int = 0
    snapshot_blocks: int = 0
    unknown_requests: int = 0


class Archive:
    """The recent past of one stream and its present map. Used by one thread."""

    def __init__(
        self,
        *,
        topic: bytes | None = b"",
        rank: int | None = None,
        epoch: int = 0,
        batches: int = 10_000,
        snapshots: bool = True,
        integers: bool = False,
        plain: bool = False,
    ) -> None:
        """Keep the last ``batches`` for replay and, with ``snapshots``, a mirror. ``topic`` is ``None`` until it is known.

        ``integers`` writes digests in snapshots as 64-bit integers, for a stream that does the same. ``plain`` answers as
        vLLM's publisher does, which knows neither heads nor snapshots. Raises ``KvyardError`` for a negative number.
        """
        if batches < 0:
            raise KvyardError(f"a replay buffer holds 0 batches or more, not {batches}")
        self.topic = topic
        self.rank = rank
        """Rank of the batches of a snapshot."""
        self.epoch = epoch
        self.last = -1
        """The last sequence that was kept."""
        self.counters = ArchiveCounters()
        self.mirror: Mirror | None = Mirror() if snapshots and not plain else None
        self._plain = plain
        self._digest = 0
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=batches)
        self._encoder = Encoder(integers=integers)

    def keep(self, seq: int, payload: bytes, events: Sequence[Event]) -> None:
        """Keep ``payload``, which has ``events``, as batch ``seq``."""
        self._ring.append((seq, payload))
        self.last = seq
        self._digest = frames.chained(0 if restates(events) else self._digest, frames.fingerprint(payload))
        if self.mirror is not None:
            self.mirror.apply(events)

    def restart(self, epoch: int) -> None:
        """Discard everything and become another publisher, which starts again at sequence 0."""
        self.epoch = epoch
        self.last = -1
        self._digest = 0
        self._ring.clear()
        if self.mirror is not None:
            self.mirror.clear()

    def head(self) -> frames.StreamHead:
        """Return the stream's current position."""
        first = self._ring[0][0] if self._ring else None
        return frames.StreamHead(epoch=self.epoch, seq=self.last, digest=self._digest, first=first)

    def answer(self, word: bytes) -> Iterator[list[bytes]]:
        """Return the messages that answer ``word``, each without the asker's address; the last is always the end marker."""
        if not self._plain and word == frames.HEAD_WORD:
            self.counters.heads += 1
            head = frames.reply_parts(self.topic, word, frames.write_head(self.head()))
            return iter([head, frames.end_reply()])
        if not self._plain and word == frames.SNAPSHOT_WORD:
            return self._snapshot()
        if len(word) != frames.SEQUENCE_BYTES:
            self.counters.unknown_requests += 1
        # As in vLLM a word is a number, whatever its length; one beyond the last sequence gets the end marker alone.
        start = int.from_bytes(word, "big")
        batches = [entry for entry in self._ring if entry[0] >= start]
        self.counters.replays += 1
        self.counters.replayed_batches += len(batches)
        replies = (frames.reply_parts(self.topic, *entry) for entry in batches)
        return chain(replies, [frames.end_reply()])

    def _snapshot(self) -> Iterator[list[bytes]]:
        if self.mirror is None:
            return iter([frames.end_reply()])
        parts = list(_portions(self.mirror.events()))
        blocks = self.mirror.blocks
        self.counters.snapshots += 1
        self.counters.snapshot_blocks += blocks
        head = msgspec.structs.replace(self.head(), parts=len(parts), blocks=blocks)
        return self._parts(head, parts)

    def _parts(self, head: frames.StreamHead, parts: list[list[Event]]) -> Iterator[list[bytes]]:
        topic = self.topic
        yield frames.reply_parts(topic, frames.SNAPSHOT_WORD, frames.write_head(head))
        for events in parts:
            # Encoded only when it is this part's turn: a large map must not hold up the stream.
            batch = EventBatch(stream="", seq=head.seq, events=events, rank=self.rank)
            yield frames.reply_parts(topic, frames.PART_WORD, self._encoder.encode(batch))
        yield frames.end_reply()


def _portions(events: Iterable[Event]) -> Iterator[list[Event]]:
    portion: list[Event] = []
    blocks = 0
    for event in events:
        portion.append(event)
        blocks += len(event.hashes) if isinstance(event, Stored) else 0
        if blocks >= PART_BLOCKS:
            yield portion
            portion, blocks = [], 0
    if portion:
        yield portion


SLICE = 64
"""Messages of one answer before another gets its turn."""
MAX_ANSWERS = 256
STUCK = 60 * SECOND
PAUSE_MS = 50
"""After something went wrong that wasn't thought of."""


class OutletCounters(msgspec.Struct):
    """Counters of messages sent and requests received."""

    sent: int = 0
    sent_bytes: int = 0
    requests: int = 0
    malformed_requests: int = 0
    refused_requests: int = 0
    """Too many at once."""
    abandoned_answers: int = 0
    """The asker left, or stopped reading."""


class _Unsent(msgspec.Struct):
    """Remainder of an answer."""

    client: bytes
    messages: Iterator[list[bytes]]
    moved: int
    waiting: list[bytes] | None = None


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
        """Opens nothing yet. ``bind`` decides if the stream's address is bound or connected to, if the address doesn't.
        Raises ``KvyardError`` for endpoints that ``rank`` can't have.
        """
        self.archive = archive
        self.counters = OutletCounters()
        self.endpoint = at_rank(endpoint, rank)
        """Endpoint of the stream; once open, with the port that was chosen for port 0."""
        self.replay_endpoint = None if replay is None else at_rank(replay, rank)
        self.subscribers = 0
        """Number of subscribers as of the last ``serve``; only if they are counted."""
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
        context = shared_context()
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

    def send(self, parts: list[bytes]) -> None:
        """Publish a message to all subscribers; it may be no batch at all."""
        self._pub.send_multipart(parts)
        self.counters.sent += 1
        self.counters.sent_bytes += len(parts[-1])

    def serve(self) -> bool:
        """Read requests and send a slice of every answer in flight. Returns true if anything was read or sent."""
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
        """Return true if an answer is in flight."""
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
                message = self._pub.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.subscribers += {b"\x01": 1, b"\x00": -1}.get(message[:1], 0)

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
        """Send a slice of ``answer`` and return the number of messages sent; -1 if none will follow."""
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


class OutletThread:
    """Serves an outlet in a thread of its own. ``start`` and ``close`` it, or use it in a ``with`` block."""

    role: str

    def __init__(self, outlet: Outlet) -> None:
        self.outlet = outlet
        self._waker: Waker | None = None
        self._thread: threading.Thread | None = None
        self._stopping = self._aborting = False
        self.error: Exception | None = None
        """The last thing that went wrong in the thread, for inspection."""
        self.failures = 0
        """Number of failed sends."""

    @property
    def endpoint(self) -> str:
        """Return the stream's endpoint; once started, with the port that was chosen for port 0."""
        return self.outlet.endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """Return the endpoint for replay and snapshots."""
        return self.outlet.replay_endpoint

    def start(self) -> Self:
        """Open the sockets and start sending. Raises ``KvyardError``, with nothing left open, if that fails."""
        if self._thread is not None or self._stopping:
            raise KvyardError(f"a {self.role} starts once: make another")
        inputs = self._open()
        self._waker = waker = Waker()
        name = f"kvyard-{self.role} {self.endpoint}"
        self._thread = threading.Thread(target=self._run, args=(waker, *inputs), name=name, daemon=True)
        self._thread.start()
        return self

    def close(self, timeout: float = 1.0) -> None:
        """Send what waits, within ``timeout`` seconds, then end the thread and close the sockets. Twice does no harm."""
        self._stopping = True
        thread, self._thread = self._thread, None
        if thread is None or self._waker is None:
            return
        self._waker.wake()
        thread.join(timeout)
        self._aborting = True
        self._waker.wake()
        thread.join()
        self._waker.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _open(self) -> list[Any]:
        """Open the sockets; returns those to read from, beside the outlet's own."""
        self.outlet.open()
        return []

    def _work(self, *inputs: Any) -> bool:
        """Send something, if there is anything; returns whether there was."""
        raise NotImplementedError

    def _run(self, waker: Waker, *inputs: Any) -> None:
        outlet = self.outlet
        try:
            while not self._aborting:
                try:
                    if self._work(*inputs) | outlet.serve():
                        continue
                    if self._stopping:
                        break
                    outlet.wait(10 if outlet.busy else 1000, waker, *inputs)
                except Exception as error:
                    # A stream that ends because of one answer or one moment without memory would end for all its readers.
                    self.error = error
                    self.failures += 1
                    log.error("%s %s: %s: %s", self.role, self.endpoint, type(error).__name__, error, exc_info=error)
                    if self._stopping:
                        break
                    outlet.wait(PAUSE_MS, waker)
        finally:
            outlet.close()
            for socket in inputs:
                socket.close(linger=0)
