"""A subscription: everything that arrives at one subscriber, sorted into streams by topic. No sockets here either.

Usually a publisher has one topic. Where publishers come to the subscriber, each has its own, and each is followed by itself.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import msgspec

from kvyard.events.transport.frames import Frame, Reply, ReplyKind, fingerprint, read_live, read_reply
from kvyard.events.transport.inquiry import Inquiry, ReplayRequest, RequestKind
from kvyard.events.transport.phases import Signal
from kvyard.events.transport.position import StreamPosition, UpdateLog, WaitingBytes
from kvyard.events.transport.recovery import Recovery
from kvyard.events.transport.state import Limits, Origin, State, StreamStatus, Update
from kvyard.events.wire import Decoder

_ENDED = {RequestKind.HEAD: Signal.HEAD, RequestKind.SNAPSHOT: Signal.SNAPSHOT}


class Follower:
    """Keeps one stream whole, or reports that it isn't."""

    def __init__(
        self,
        stream: str,
        *,
        topic: bytes | None = None,
        prefix: bytes = b"",
        source: bool = True,
        limits: Limits | None = None,
        decoder: Decoder | None = None,
        numbers: Iterator[int] | None = None,
        updates: deque[Update] | None = None,
        waiting: WaitingBytes | None = None,
    ) -> None:
        """``topic`` is learned if not given; replies with one that doesn't begin with ``prefix`` are dropped.

        ``source`` says whether there is a replay socket to ask. ``numbers`` numbers requests and ``waiting`` counts, across
        followers.
        """
        limits = limits or Limits()
        self.at = StreamPosition(limits.remembered, waiting)
        self.updates: deque[Update] = deque() if updates is None else updates
        self._source = source
        self._prefix = prefix
        self.log = UpdateLog(stream, topic, self.at, self.updates)
        self.decoder = decoder or Decoder()
        self.inquiry = Inquiry(limits, numbers or count(1), self.decoder.decode)
        self.recovery = Recovery(self.at, self.log, self.inquiry, self.decoder, limits, source)

    def start(self, now: int) -> None:
        """Begin: ask for what there is, if there is a replay socket."""
        self.recovery.heard = self.recovery.probed = now
        self.log.reason = "nothing is known yet"
        self.recovery.handle(Signal.LOOK, now)

    def resume(self, topic: bytes, seq: int, digest: int, publisher_epoch: int | None, now: int) -> None:
        """Go on after batch ``seq``: another reader applied everything up to there, and its result was taken over."""
        self.recovery.heard = self.recovery.probed = now
        self.log.topic, self.log.publisher_epoch = topic, publisher_epoch
        self.at.move(seq, digest)
        self.recovery.resume(now)

    def live(self, frame: Frame, now: int) -> None:
        """A live batch arrived."""
        position, counters, recovery = self.at, self.log.counters, self.recovery
        counters.frames += 1
        recovery.order += 1
        recovery.heard, recovery.quiet = now, 0
        if self.log.topic is None:
            self.log.topic = frame.topic
        seq, mark = frame.seq, fingerprint(frame.payload)
        before, recovery.highest = recovery.highest, max(recovery.highest, seq)
        if seq <= position.applied and self._is_repetition(seq, mark, rising=seq > before):
            return
        held = position.held.get(seq)
        if held is not None and held.print == mark:
            counters.duplicates += 1
            return
        batch = recovery.read(seq, mark, frame.payload, Origin.LIVE)
        if batch.decoded.lossy:
            counters.damaged += 1
            if seq <= position.applied or held is not None:
                return
        counters.late += position.applied < seq < before
        recovery.accept(batch, now)

    def reply(self, number: int, reply: Reply, now: int) -> None:
        """The publisher answered request ``number``."""
        request, log = self.inquiry.request, self.log
        if request is None or request.number != number:
            log.counters.late_replies += 1
            return
        if reply.topic is not None and reply.kind != ReplyKind.END:
            if reply.topic != log.topic and (log.topic is not None or not reply.topic.startswith(self._prefix)):
                log.counters.foreign += 1
                return
            log.topic = reply.topic
        self.inquiry.take(reply, now)
        if reply.kind == ReplyKind.BATCH:
            if self.inquiry.replays:
                self.recovery.replayed(reply, now)
        elif reply.kind == ReplyKind.END:
            self.recovery.handle(_ENDED.get(request.kind, Signal.REPLAY), now)

    def _is_repetition(self, seq: int, mark: int, rising: bool) -> bool:
        """Return true if an old sequence number is harmless."""
        known, counters = self.at.prints.get(seq), self.log.counters
        if known == mark:
            counters.duplicates += 1
        elif known is None and rising:
            # Brought by a snapshot already, which says nothing of single batches.
            counters.covered += 1
        elif known is None and self.at.passed_over(seq):
            # Given up before, and what came after it was applied: too late to be of use.
            counters.late += 1
        else:
            return False
        return True


MAX_TOPICS = 4096


class SubscriptionCounters(msgspec.Struct):
    """Counters of messages that belong to no stream."""

    malformed: int = 0
    """Messages that are no batches."""
    malformed_replies: int = 0
    too_many_topics: int = 0
    connections: int = 0
    disconnections: int = 0
    last_malformed: str = ""


class Subscription:
    """The streams of one subscriber."""

    def __init__(
        self,
        stream: str,
        *,
        source: bool,
        prefix: str = "",
        limits: Limits | None = None,
        decoder: Callable[[], Decoder] = Decoder,
    ) -> None:
        """Topics that don't begin with ``prefix`` are none of ours. ``decoder`` makes one for each stream."""
        self.stream = stream
        self.updates: deque[Update] = deque()
        self.counters = SubscriptionCounters()
        self._source = source
        self._prefix = prefix.encode()
        self._limits = limits or Limits()
        self._decoder = decoder
        self._waiting = WaitingBytes()
        self._numbers = count(1)
        self._followers: dict[bytes | None, Follower] = {}

    def start(self, now: int) -> None:
        """Make the first request, before anything was received, if there is a replay socket."""
        if self._source:
            self._follow(None, now)

    def positions(self) -> dict[bytes, tuple[int, int, int | None]]:
        """Return per topic of a stream that is whole: the last batch applied, the digest of all, and the publisher's epoch."""
        return {
            follower.log.topic: (follower.at.applied, follower.at.digest, follower.log.publisher_epoch)
            for follower in self._followers.values()
            if follower.log.topic is not None and follower.log.state == State.FRESH
        }

    def resume(self, topic: bytes, position: tuple[int, int, int | None], now: int) -> None:
        """Go on with ``topic`` from another subscription's position; see ``Follower.resume``."""
        follower = self._followers.get(topic)
        if follower is None:
            follower = self._find(topic, now)
        if follower is not None:
            follower.resume(topic, *position, now)

    def decoder_of(self, parts: Sequence[bytes], now: int, number: int | None = None) -> Decoder | None:
        """Return the decoder for a message that arrived at ``now``: that of its topic, which is followed from now on, or of
        request ``number``. ``None`` if the message is unreadable.
        """
        if number is None:
            frame = read_live(parts)
            follower = (
                None if isinstance(frame, str) else self._followers.get(frame.topic) or self._find(frame.topic, now)
            )
            return None if follower is None else follower.decoder
        for follower in self._followers.values():
            request = follower.inquiry.request
            if request is not None and request.number == number:
                return follower.decoder
        return None

    def message(self, parts: Sequence[bytes], now: int) -> None:
        """A message arrived on the stream's socket."""
        frame = read_live(parts)
        if isinstance(frame, str):
            self.counters.malformed += 1
            self.counters.last_malformed = frame
            return
        follower = self._followers.get(frame.topic) or self._find(frame.topic, now)
        if follower is not None:
            follower.live(frame, now)

    def reply(self, number: int, parts: Sequence[bytes], now: int) -> None:
        """A message arrived in answer to request ``number``."""
        reply = read_reply(parts)
        if isinstance(reply, str):
            self.counters.malformed_replies += 1
            self.counters.last_malformed = reply
            return
        for follower in self._followers.values():
            if follower.inquiry.request is not None and follower.inquiry.request.number == number:
                follower.reply(number, reply, now)
                return

    def connected(self, now: int) -> None:
        """A connection to a publisher was made, for the first time or again."""
        self.counters.connections += 1
        for follower in self._followers.values():
            if self.counters.disconnections:
                follower.recovery.handle(Signal.RECONNECTED, now)
            elif follower.log.state == State.STALE:
                follower.recovery.handle(Signal.LOOK, now)

    def disconnected(self) -> None:
        """A connection broke."""
        self.counters.disconnections += 1

    def tick(self, now: int) -> None:
        """Do everything that is due at ``now``."""
        for follower in self._followers.values():
            follower.recovery.tick(now)

    @property
    def due(self) -> int | None:
        """Return the time at which ``tick`` should be called."""
        dues = (follower.recovery.due for follower in self._followers.values())
        return min((due for due in dues if due is not None), default=None)

    @property
    def requests(self) -> dict[int, ReplayRequest]:
        """Return the requests that should be in flight, by number."""
        requests = (follower.inquiry.request for follower in self._followers.values())
        return {request.number: request for request in requests if request is not None}

    @property
    def state(self) -> State:
        """The worst state of any stream; stale if there is none."""
        states = {follower.log.state for follower in self._followers.values()}
        for state in (State.STALE, State.CATCHING_UP):
            if state in states:
                return state
        return State.FRESH if states else State.STALE

    def statuses(self) -> list[StreamStatus]:
        """Return a look at every stream."""
        return [follower.log.status() for follower in self._followers.values()]

    def _find(self, topic: bytes, now: int) -> Follower | None:
        """Return the follower of a topic that is seen for the first time."""
        nameless = self._followers.get(None)
        if nameless is not None and nameless.log.topic in (None, topic):
            self._followers[topic] = nameless
            del self._followers[None]
            return nameless
        if len(self._followers) >= MAX_TOPICS:
            self.counters.too_many_topics += 1
            return None
        return self._follow(topic, now)

    def _follow(self, topic: bytes | None, now: int) -> Follower:
        follower = Follower(
            self.stream,
            topic=topic,
            prefix=self._prefix,
            source=self._source,
            limits=self._limits,
            decoder=self._decoder(),
            numbers=self._numbers,
            updates=self.updates,
            waiting=self._waiting,
        )
        self._followers[topic] = follower
        follower.start(now)
        return follower
