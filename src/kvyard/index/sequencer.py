"""Batches that come without a transport, as the updates that a follower would make of them.

For simulations and tests, where a batcher and an index are in one process. There is nothing to ask for what is missing, so a
stream with a gap is stale until a batch clears everything.
"""

from __future__ import annotations

from kvyard.events.mirror import restates
from kvyard.events.transport import Origin, State, Update
from kvyard.events.types import EventBatch


class _BatchPosition:
    __slots__ = ("epoch", "ranks", "seq", "whole")

    def __init__(self) -> None:
        self.epoch = self.seq = -1
        self.ranks: set[int | None] = set()
        """Those whose part of batch ``seq`` came; each comes as a batch of its own."""
        self.whole = True


class BatchSequencer:
    """The position of each stream."""

    def __init__(self) -> None:
        self._positions: dict[str, _BatchPosition] = {}

    def update(self, batch: EventBatch) -> Update | None:
        """What to apply for ``batch``; ``None`` where it came before."""
        at = self._positions.get(batch.stream)
        if at is None:
            at = self._positions[batch.stream] = _BatchPosition()
        known = at.epoch >= 0
        if batch.epoch < at.epoch:
            return None
        restarted = batch.epoch > at.epoch
        if restarted:
            at.epoch, at.seq, at.whole = batch.epoch, -1, True
        elif batch.seq < at.seq or (batch.seq == at.seq and batch.rank in at.ranks):
            return None
        follows = at.whole and batch.seq <= at.seq + 1
        at.whole = follows or restates(batch.events)
        if batch.seq != at.seq:
            at.seq = batch.seq
            at.ranks.clear()
        at.ranks.add(batch.rank)
        state, reason = State.FRESH, ""
        if not at.whole:
            state, reason = State.STALE, f"batches before {batch.seq} are missing"
        return Update(
            stream=batch.stream,
            topic="",
            epoch=batch.epoch,
            seq=batch.seq,
            origin=Origin.LIVE,
            state=state,
            events=batch.events,
            ts=batch.ts,
            rank=batch.rank,
            dialect="native",
            reason=reason,
            replaces=known and (restarted or (at.whole and not follows)),
        )

    def forget(self, stream: str) -> None:
        """The stream is over; one of the same name begins anywhere."""
        self._positions.pop(stream, None)
