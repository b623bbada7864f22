"""The follower: one stream's batches in, updates in order out.

It has no sockets, threads or clock. It is told what arrived and what time it is; it says what to pass on (``updates``), what
it wants to ask the publisher (``request``) and when it wants to be woken (``due``). Here messages are sorted: repetitions and
replies to old requests are dropped. What the rest does to the stream is in ``recovery``. A batch that comes late is compared
with what was applied, and never applied over it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count

from kvyard.events.transport.frames import Frame, Reply, ReplyKind, fingerprint
from kvyard.events.transport.inquiry import Inquiry, ReplayRequest, RequestKind
from kvyard.events.transport.position import StreamPosition
from kvyard.events.transport.recovery import Recovery, Signal
from kvyard.events.transport.state import Limits, Origin, State, StreamStatus, Update
from kvyard.events.transport.update_log import UpdateLog
from kvyard.events.wire import Decoder

_ENDED = {RequestKind.HEAD: Signal.HEAD, RequestKind.SNAPSHOT: Signal.SNAPSHOT}


class Follower:
    """Keeps one stream whole, or says that it isn't."""

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
    ) -> None:
        """``topic`` is learned if not given; replies with one that doesn't begin with ``prefix`` are dropped.

        ``source`` says whether there is a replay socket to ask. ``numbers`` numbers requests, across followers.
        """
        limits = limits or Limits()
        self.at = StreamPosition(limits.remembered)
        self.updates: deque[Update] = deque() if updates is None else updates
        self._source = source
        self._prefix = prefix
        self._log = UpdateLog(stream, topic, self.at, self.updates)
        self._inquiry = Inquiry(limits, numbers or count(1))
        self._recovery = Recovery(self.at, self._log, self._inquiry, decoder or Decoder(), limits, source)

    @property
    def request(self) -> ReplayRequest | None:
        """What the publisher should be asked."""
        return self._inquiry.request

    @property
    def state(self) -> State:
        return self._log.state

    @property
    def whole(self) -> bool:
        """Whether everything up to the last applied batch was applied."""
        return self._recovery.whole

    @property
    def topic(self) -> bytes | None:
        """The stream's topic, once known."""
        return self._log.topic

    @property
    def due(self) -> int | None:
        """When ``tick`` should be called, ``None`` where nothing is to be waited for."""
        return self._recovery.due

    def status(self) -> StreamStatus:
        return self._log.status()

    def start(self, now: int) -> None:
        """Begin: ask for what there is, if there is a replay socket."""
        self._recovery.heard = self._recovery.probed = now
        self._log.reason = "nothing is known yet"
        self._recovery.handle(Signal.LOOK, now)

    def resume(self, topic: bytes, seq: int, digest: int, publisher_epoch: int | None, now: int) -> None:
        """Go on after batch ``seq``: another reader applied everything up to there, and its result was taken over."""
        self._recovery.heard = self._recovery.probed = now
        self._log.topic, self._log.publisher_epoch = topic, publisher_epoch
        self.at.move(seq, digest)
        self._recovery.resume(now)

    def live(self, frame: Frame, now: int) -> None:
        """A live batch arrived."""
        at, counters, recovery = self.at, self._log.counters, self._recovery
        counters.frames += 1
        recovery.order += 1
        recovery.heard, recovery.quiet = now, 0
        if self._log.topic is None:
            self._log.topic = frame.topic
        seq, mark = frame.seq, fingerprint(frame.payload)
        before, recovery.highest = recovery.highest, max(recovery.highest, seq)
        if seq <= at.applied and self._is_repetition(seq, mark, rising=seq > before):
            return
        held = at.held.get(seq)
        if held is not None and held.print == mark:
            counters.duplicates += 1
            return
        batch = recovery.read(seq, mark, frame.payload, Origin.LIVE)
        if batch.decoded.lossy:
            counters.damaged += 1
            if seq <= at.applied or held is not None:
                return
        counters.late += at.applied < seq < before
        recovery.accept(batch, now)

    def reply(self, number: int, reply: Reply, now: int) -> None:
        """The publisher answered request ``number``."""
        request, log = self._inquiry.request, self._log
        if request is None or request.number != number:
            log.counters.late_replies += 1
            return
        if reply.topic is not None and reply.kind != ReplyKind.END:
            if reply.topic != log.topic and (log.topic is not None or not reply.topic.startswith(self._prefix)):
                log.counters.foreign += 1
                return
            log.topic = reply.topic
        self._inquiry.take(reply, now)
        if reply.kind == ReplyKind.BATCH:
            if self._inquiry.replays:
                self._recovery.replayed(reply, now)
        elif reply.kind == ReplyKind.END:
            self._recovery.handle(_ENDED.get(request.kind, Signal.REPLAY), now)

    def tick(self, now: int) -> None:
        """It is ``now``: does what has become due."""
        self._recovery.tick(now)

    def reconnected(self, now: int) -> None:
        """The connection was broken for a while."""
        self._recovery.handle(Signal.RECONNECTED, now)

    def look(self, now: int) -> None:
        """Find out now whether anything was missed."""
        self._recovery.handle(Signal.LOOK, now)

    def _is_repetition(self, seq: int, mark: int, rising: bool) -> bool:
        """Whether an old sequence number is nothing to worry about."""
        known, counters = self.at.print_of(seq), self._log.counters
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
