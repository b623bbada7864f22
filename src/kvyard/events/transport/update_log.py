"""The update log of a stream: its state, with a reason where it isn't fresh, and the updates for the consumer, in order."""

from __future__ import annotations

from collections import deque

from kvyard.events.transport.position import ReceivedBatch, StreamPosition
from kvyard.events.transport.state import FollowerCounters, Origin, State, StreamStatus, Update
from kvyard.events.types import Event
from kvyard.events.wire import Decoded


class UpdateLog:
    """What one stream hands to its consumer."""

    def __init__(self, stream: str, topic: bytes | None, at: StreamPosition, updates: deque[Update]) -> None:
        self.stream = stream
        self.topic = topic
        self.state = State.STALE
        self.reason = "nothing heard yet"
        self.epoch = 0
        self.publisher_epoch: int | None = None
        self.rank: int | None = None
        """The rank of the last batch."""
        self.counters = FollowerCounters()
        self.updates = updates
        self._at = at

    def set_state(self, state: State, reason: str = "") -> None:
        """Change the state; an update tells the consumer where that is news."""
        changed = state != self.state or (state == State.STALE and reason != self.reason)
        self.state, self.reason = state, reason
        if changed:
            self.add(Origin.STATE, [])

    def add(self, origin: Origin, events: list[Event], reason: str | None = None) -> None:
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
