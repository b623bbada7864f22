"""A stream as the index sees it: where it stands, how far it can be trusted, and which holders it speaks for.

Sequencing proper (gaps, duplicates, restarts, replay, snapshots, what waits meanwhile) is the transport's follower's, and
its states are used here under their own names. This is the thin end of it: updates come in order, and what isn't in order
after all, because somebody feeds batches without a follower, is noticed and owned up to rather than applied.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvyard.blocks.spec import GroupSpec
from kvyard.errors import KvyardError
from kvyard.events.transport import Origin, State, Update
from kvyard.events.transport.ledger import restates
from kvyard.events.types import Cleared, EventBatch
from kvyard.index.feed import Feed
from kvyard.index.places import Holder

CLEAR_SCOPES = ("device", "all")
_LIVE, _FRESH = Origin.LIVE, State.FRESH
"""Asked for with every batch, and members of an enumeration are slow to look up."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Whose stream it is, and how to read it."""

    stream: str
    """The name its updates carry."""
    worker: str = ""
    rank: int = 0
    pool: str = ""
    """The shared pool whose copies it announces, instead of a worker's."""
    by_rank: bool = False
    """Take the rank from each batch that says one: a stream that speaks for several ranks."""
    groups: Sequence[GroupSpec] | None = None
    """The holder's attention groups; left out, they are learned from events."""
    alignment: int | None = None
    """The engine's scheduler block size, where it isn't the groups' common multiple."""
    clear_scope: str = "device"
    """What a clear that names no tier empties: ``device``, as engines mean it, or ``all``, as kvyard's own batcher does."""

    def __post_init__(self) -> None:
        if bool(self.worker) == bool(self.pool):
            raise KvyardError(f"stream {self.stream!r} needs either a worker or a pool")
        if self.clear_scope not in CLEAR_SCOPES:
            raise KvyardError(f"unknown clear_scope {self.clear_scope!r}: choose one of {', '.join(CLEAR_SCOPES)}")

    def holder(self, rank: int | None = None) -> Holder:
        """Who holds what it announces for ``rank``."""
        if self.pool:
            return Holder(self.pool, 0, True)
        return Holder(self.worker, rank if self.by_rank and rank is not None else self.rank)


class StreamCounters(msgspec.Struct):
    """What came in, in updates."""

    applied: int = 0
    duplicates: int = 0
    """Came again, or after what follows it: not applied."""
    gaps: int = 0
    """Something was missing and nobody had said so."""
    resets: int = 0


class Stream:
    """One (stream, topic)."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.state = State.STALE
        self.reason = "nothing heard yet"
        self.epoch = -1
        self.seq = -1
        self.updated = 0
        """When an update last came, on the clock of whoever brings them."""
        self.ts = 0.0
        """The last batch's own stamp, in seconds."""
        self.counters = StreamCounters()
        self.feeds: dict[int | None, Feed] = {}
        """By the rank that updates say, for whoever applies them."""
        self._ranks: set[int | None] = set()
        """Of the last batch, those applied."""
        self._lost = False
        """Whether batches are missing, by our own count."""

    def admit(self, update: Update, now: int) -> str:
        """What to do with ``update``: ``"apply"``, ``"replace"`` (all that was known of the stream goes first) or ``"drop"``.

        Changes the stream's state and position to what they are once that is done.
        """
        self.updated = now
        if update.ts:
            self.ts = update.ts
        origin = update.origin
        if (
            update.seq == self.seq + 1
            and update.epoch == self.epoch
            and update.state is self.state is _FRESH
            and origin is _LIVE
            and not self._lost
        ):
            # The next batch of a stream that is whole, as nearly all are.
            self.seq += 1
            self._ranks = {update.rank}
            self.counters.applied += 1
            return "apply"
        if origin is Origin.STATE:
            if not self._lost:
                self._become(update.state, update.reason)
            return "drop"
        if update.epoch < self.epoch:
            self.counters.duplicates += 1
            return "drop"
        if origin is not Origin.LIVE and (origin is not Origin.REPLAY or _is_statement(update)):
            self.counters.resets += 1
            self._move(update)
            self._become(update.state, update.reason)
            return "replace"
        return self._admit_batch(update)

    def _admit_batch(self, update: Update) -> str:
        verdict = "apply"
        if update.epoch > self.epoch:
            verdict = "apply" if self.epoch < 0 else "replace"
            self.epoch = update.epoch
            self._lost = update.seq > 0 and not restates(update.events)
        elif update.seq < self.seq or (update.seq == self.seq and update.rank in self._ranks):
            self.counters.duplicates += 1
            return "drop"
        elif (self._lost or update.seq > self.seq + 1) and restates(update.events):
            # What was missed may have been about any tier, so this clears all of them.
            self._lost, verdict = False, "replace"
        elif update.seq > self.seq + 1:
            self.counters.gaps += 1
            self._lost = True
        if update.seq != self.seq:
            self._ranks.clear()
        self.seq = update.seq
        self._ranks.add(update.rank)
        self.counters.applied += 1
        if self._lost:
            # However many batches follow, what is missing stays so until all is said anew.
            self._become(State.STALE, update.reason or f"batches before {update.seq} are missing")
        else:
            self._become(update.state, update.reason)
        return verdict

    def lose(self, reason: str) -> None:
        """Something is missing, as somebody else found out."""
        self._lost = True
        self._become(State.STALE, reason)

    def _move(self, update: Update) -> None:
        self.epoch, self.seq = update.epoch, update.seq
        self._lost = False
        self._ranks.clear()

    def _become(self, state: State, reason: str) -> None:
        self.state = state
        self.reason = "" if state == State.FRESH else reason


def _is_statement(update: Update) -> bool:
    """Whether it is no batch but a follower's own word that all before is void, ahead of a replay from the beginning."""
    return update.dialect == "none" and update.events == [Cleared()]


def update_of(batch: EventBatch, state: State = State.FRESH) -> Update:
    """A batch that was handed over in person, as an update: for simulations, where no transport is in between."""
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
    )
