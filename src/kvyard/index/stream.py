"""A stream as the index sees it: where it stands, how far it can be trusted, and which holders it reports for.

Sequencing (gaps, duplicates, restarts, replay, snapshots) is done before: by the transport's follower, or by
``BatchSequencer`` for batches that come without a transport.
"""

from collections.abc import Iterator, Sequence

import msgspec

from kvyard.blocks.spec import GroupSpec
from kvyard.errors import KvyardError, suggest
from kvyard.events.mirror import restates
from kvyard.events.slices import slices
from kvyard.events.transport import Origin, State, Update
from kvyard.events.types import EventBatch
from kvyard.index.feed import Feed
from kvyard.index.places import Holder

CLEAR_SCOPES = ("device", "all")
SEVERITY = {State.FRESH: 0, State.CATCHING_UP: 1, State.STALE: 2}
"""The higher the worse."""
_STATE, _FRESH = Origin.STATE, State.FRESH
"""Compared with every batch, and members of an enumeration are slow to look up."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of a stream, and how to read it."""

    stream: str
    """The name its updates carry."""
    worker: str = ""
    rank: int = 0
    pool: str = ""
    """The shared pool whose copies it announces, instead of a worker's."""
    by_rank: bool = False
    """Take the rank from each batch that has one: a stream that reports for several ranks."""
    groups: Sequence[GroupSpec] | None = None
    """The holder's attention groups; left out, they are learned from events."""
    alignment: int | None = None
    """The engine's scheduler block size, if it isn't the groups' common multiple."""
    clear_scope: str = "all"
    """The tiers that a clear empties if it names none: ``all`` of the pod, or the ``device``, where engines keep the rest."""

    def __post_init__(self) -> None:
        if bool(self.worker) == bool(self.pool):
            raise KvyardError(f"stream {self.stream!r} needs either a worker or a pool")
        if self.clear_scope not in CLEAR_SCOPES:
            raise KvyardError(f"unknown clear_scope {self.clear_scope!r}: {suggest(self.clear_scope, CLEAR_SCOPES)}")

    def holder(self, rank: int | None = None) -> Holder:
        """Return the holder of the blocks announced for ``rank``."""
        if self.pool:
            return Holder(self.pool, 0, True)
        return Holder(self.worker, rank if self.by_rank and rank is not None else self.rank)


class FollowedStream(msgspec.Struct, eq=False):
    """One (stream, topic). What it says is trusted: whether anything is missing is for the follower before it to find out."""

    source: Source
    state: State = State.STALE
    reason: str = "nothing received yet"
    seq: int = -1
    updated: int = 0
    """Time of the latest update, on the clock of the caller."""
    ts: float = 0.0
    """The last batch's own stamp, in seconds."""
    resets: int = 0
    """Restarts, snapshots and other updates that replaced all before them."""
    feeds: dict[Holder, Feed] = {}
    by_rank: dict[int | None, Feed] = {}
    """Feeds by the rank that updates name."""
    lost: bool = False
    """True if events are missing that only an update which replaces or clears everything can make up for."""
    distrusted: bool = False
    """True if its worker lacks what it announced: stale for that reason."""

    def follow(self, update: Update, now: int) -> None:
        """Take over position, time and state of ``update``."""
        self.updated = now
        if update.ts:
            self.ts = update.ts
        if update.origin is not _STATE:
            self.seq = update.seq
            if update.replaces:
                self.resets += 1
                self.lost = self.distrusted = False
            elif self.lost and restates(update.events):
                self.lost = self.distrusted = False
        if not self.lost:
            self.state = update.state
            self.reason = "" if update.state is _FRESH else update.reason

    def lose(self, reason: str) -> None:
        """Be stale until an update replaces or clears everything, whatever state earlier updates have."""
        self.lost = True
        self.state, self.reason = State.STALE, reason


def in_slices(update: Update, most: int) -> Iterator[Update]:
    """Yield ``update`` as several, of about ``most`` blocks each; only the last says that the stream is as fresh as it is."""
    last: Update | None = None
    for events in slices(update.events, most):
        if last is not None:
            yield last
        busy = (
            {}
            if update.state is State.STALE
            else {"state": State.CATCHING_UP, "reason": "a large batch is being applied"}
        )
        last = msgspec.structs.replace(update, events=events, replaces=update.replaces and last is None, **busy)
    if last is None:
        yield update
    else:
        yield msgspec.structs.replace(last, state=update.state, reason=update.reason)


class _BatchPosition(msgspec.Struct):
    epoch: int = -1
    seq: int = -1
    ranks: set[int | None] = msgspec.field(default_factory=set)
    """Ranks whose part of batch ``seq`` arrived; each comes as a batch of its own."""
    whole: bool = True


class BatchSequencer:
    """Turns batches without a transport into updates, as a follower does.

    For simulations and tests, where a batcher and an index are in one process. There is nothing to ask for what is missing, so
    a stream with a gap is stale until a batch clears everything.
    """

    def __init__(self) -> None:
        self._positions: dict[str, _BatchPosition] = {}

    def update(self, batch: EventBatch) -> Update | None:
        """Return the update for ``batch``; ``None`` for a duplicate."""
        position = self._positions.get(batch.stream)
        if position is None:
            position = self._positions[batch.stream] = _BatchPosition()
        known = position.epoch >= 0
        if batch.epoch < position.epoch:
            return None
        restarted = batch.epoch > position.epoch
        if restarted:
            position.epoch, position.seq, position.whole = batch.epoch, -1, True
        elif batch.seq < position.seq or (batch.seq == position.seq and batch.rank in position.ranks):
            return None
        follows = position.whole and batch.seq <= position.seq + 1
        position.whole = follows or restates(batch.events)
        if batch.seq != position.seq:
            position.seq = batch.seq
            position.ranks.clear()
        position.ranks.add(batch.rank)
        state, reason = State.FRESH, ""
        if not position.whole:
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
            replaces=known and (restarted or (position.whole and not follows)),
        )

    def forget(self, stream: str) -> None:
        """Forget ``stream``; another of the same name may begin anywhere."""
        self._positions.pop(stream, None)
