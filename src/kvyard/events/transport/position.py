"""Position of a reader in a stream: the latest batch applied, fingerprints of earlier ones, batches that came too early;
and its output: a state, with a reason if it isn't fresh, and updates, in order.

Only bookkeeping. What to do about a gap is decided in ``recovery``.
"""

from collections import deque
from collections.abc import Sequence

import msgspec

from kvyard.events.transport.fingerprints import Fingerprints
from kvyard.events.transport.frames import chained
from kvyard.events.transport.state import FollowerCounters, Origin, State, StreamStatus, Update
from kvyard.events.types import Event
from kvyard.events.wire import Decoded


class ReceivedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that was received and decoded."""

    seq: int
    print: int
    """The payload's fingerprint."""
    decoded: Decoded
    origin: Origin
    order: int
    """Counts arrivals."""
    size: int
    restates: bool
    """True if it makes everything before it irrelevant."""


class WaitingBytes(msgspec.Struct):
    """Bytes of batches that came too early, of all streams of one subscription."""

    total: int = 0


class StreamPosition:
    """The last applied batch and the ones around it."""

    def __init__(self, remembered: int, waiting: WaitingBytes | None = None) -> None:
        """``waiting`` counts for several streams together."""
        self.waiting = waiting or WaitingBytes()
        self.applied = -1
        """The last sequence that was applied."""
        self.digest = 0
        """As the publisher's, where everything up to there was applied."""
        self.held: dict[int, ReceivedBatch] = {}
        """Batches that came too early, by sequence."""
        self.held_bytes = 0
        self.anchor: int | None = None
        """The last batch before the connection broke, until the publisher has shown that it knows it."""
        self._remembered = remembered
        self.prints = Fingerprints(remembered)
        """Fingerprints of the latest applied batches."""

    def passed_over(self, seq: int) -> bool:
        """Return true if ``seq`` was skipped although batches before and after it were applied."""
        first = self.prints.first
        return seq not in self.prints and seq > (self.applied if first is None else first)

    @property
    def witness(self) -> int | None:
        """A batch that identifies the publisher: another publisher has other bytes there. ``None``: none is remembered."""
        if self.anchor is not None and self.anchor in self.prints:
            return self.anchor
        return self.applied if self.applied in self.prints else None

    def advance(self, batch: ReceivedBatch) -> None:
        """``batch``, which is behind all before it, was applied; it may be further on than the next one."""
        self.applied = batch.seq
        self.digest = chained(0 if batch.restates else self.digest, batch.print)
        self.prints.add(batch.seq, batch.print)

    def move(self, applied: int, digest: int) -> None:
        """Continue after ``applied``, as after a snapshot or a restart; fingerprints of what was before are dropped."""
        self.applied, self.digest = applied, digest
        self.anchor = None
        self.prints.clear()

    def hold(self, batch: ReceivedBatch) -> None:
        self.release(batch.seq)
        self.held[batch.seq] = batch
        self.held_bytes += batch.size
        self.waiting.total += batch.size

    def release(self, seq: int) -> ReceivedBatch | None:
        batch = self.held.pop(seq, None)
        if batch is not None:
            self.held_bytes -= batch.size
            self.waiting.total -= batch.size
        return batch

    def next(self) -> ReceivedBatch | None:
        """Release the next batch if it is held and could be read in full."""
        batch = self.held.get(self.applied + 1)
        return None if batch is None or batch.decoded.lossy else self.release(batch.seq)

    def drop_covered(self) -> None:
        """Drop held batches that were applied by other ways: they must not be applied again, after what came later."""
        for seq in [seq for seq in self.held if seq <= self.applied]:
            self.release(seq)

    def drop_impossible(self, last: int, order: int) -> int:
        """Discard batches beyond ``last`` that had arrived by ``order``: the publisher hadn't sent them yet. Returns their
        number.

        Their sequence number is damaged, or they are from before a restart.
        """
        wrong = [seq for seq, batch in self.held.items() if seq > last and batch.order <= order]
        for seq in wrong:
            self.release(seq)
        return len(wrong)

    def drop_all(self) -> None:
        self.held.clear()
        self.waiting.total -= self.held_bytes
        self.held_bytes = 0

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if something is held that should not be: for tests."""
        assert self.held_bytes == sum(batch.size for batch in self.held.values()), "held bytes are miscounted"
        assert all(seq > self.applied for seq in self.held), "something is held that was applied"
        assert len(self.prints) <= self._remembered, "too many fingerprints are remembered"


class UpdateLog:
    """Updates of one stream for its consumer."""

    def __init__(self, stream: str, topic: bytes | None, position: StreamPosition, updates: deque[Update]) -> None:
        self.stream = stream
        self.topic = topic
        self.state = State.STALE
        self.reason = "nothing received yet"
        self.epoch = 0
        self.publisher_epoch: int | None = None
        self.rank: int | None = None
        """The rank of the last batch."""
        self.counters = FollowerCounters()
        self.updates = updates
        self._at = position

    def set_state(self, state: State, reason: str = "") -> None:
        """Set the state; the consumer gets an update if it changed."""
        changed = state != self.state or (state == State.STALE and reason != self.reason)
        self.state, self.reason = state, reason
        if changed:
            self.add(Origin.STATE, [])

    def add(self, origin: Origin, events: Sequence[Event], reason: str | None = None) -> None:
        """Add what is no published batch: a change of state, or ``events`` that replace all before them."""
        part = Decoded(rank=self.rank, events=events)
        self._put(origin, self._at.applied, part, reason, replaces=origin is not Origin.STATE)

    def add_batch(self, batch: ReceivedBatch) -> None:
        """Add a batch; one with events of several ranks becomes as many updates."""
        self.counters.batches += 1
        self.counters.events += len(batch.decoded.events)
        self.counters.replayed += batch.origin == Origin.REPLAY
        self.rank = batch.decoded.rank
        for part in batch.decoded.by_rank():
            self._put(batch.origin, batch.seq, part)

    def _put(self, origin: Origin, seq: int, part: Decoded, reason: str | None = None, replaces: bool = False) -> None:
        self.updates.append(
            Update(
                stream=self.stream,
                topic=self._topic_text,
                epoch=self.epoch,
                seq=seq,
                origin=origin,
                state=self.state,
                events=part.events,
                ts=part.ts,
                rank=part.rank,
                dialect=part.dialect,
                problems=part.problems,
                reason=self.reason if reason is None else reason,
                replaces=replaces,
            )
        )

    def status(self) -> StreamStatus:
        return StreamStatus(
            stream=self.stream,
            topic=self._topic_text,
            state=self.state,
            reason=self.reason,
            epoch=self.epoch,
            publisher_epoch=self.publisher_epoch,
            seq=self._at.applied,
            held=len(self._at.held),
            counters=self.counters,
        )

    @property
    def _topic_text(self) -> str:
        return (self.topic or b"").decode("utf-8", "replace")
