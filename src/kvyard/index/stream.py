"""A stream as the index sees it: where it stands, how far it can be trusted, and which holders it speaks for.

Sequencing (gaps, duplicates, restarts, replay, snapshots) is done before: by the transport's follower, or by
``BatchSequencer`` for batches that come without a transport.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvyard.blocks.spec import GroupSpec
from kvyard.errors import KvyardError
from kvyard.events.transport import Origin, State, Update
from kvyard.index.feed import Feed
from kvyard.index.places import Holder

CLEAR_SCOPES = ("device", "all")
SEVERITY = {State.FRESH: 0, State.CATCHING_UP: 1, State.STALE: 2}
"""The higher the worse."""
_STATE, _FRESH = Origin.STATE, State.FRESH
"""Compared with every batch, and members of an enumeration are slow to look up."""


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


class FollowedStream:
    """One (stream, topic). What it says is trusted: whether anything is missing is for the follower before it to find out."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.state = State.STALE
        self.reason = "nothing heard yet"
        self.seq = -1
        self.updated = 0
        """When an update last came, on the clock of the caller."""
        self.ts = 0.0
        """The last batch's own stamp, in seconds."""
        self.resets = 0
        """Restarts, snapshots and other updates that replaced all before them."""
        self.feeds: dict[Holder, Feed] = {}
        self.by_rank: dict[int | None, Feed] = {}
        """The same, by the rank that updates name."""
        self._lost = False

    def follow(self, update: Update, now: int) -> None:
        """Take over position, time and state of ``update``."""
        self.updated = now
        if update.ts:
            self.ts = update.ts
        if update.origin is not _STATE:
            self.seq = update.seq
            if update.replaces:
                self.resets += 1
                self._lost = False
        if not self._lost:
            self.state = update.state
            self.reason = "" if update.state is _FRESH else update.reason

    def lose(self, reason: str) -> None:
        """Be stale until an update replaces all, whatever state updates before that say."""
        self._lost = True
        self.state, self.reason = State.STALE, reason

    def resume(self, seq: int, state: State, reason: str, ts: float, now: int) -> None:
        """Go on after batch ``seq``, up to which another index followed the stream."""
        self.seq, self.state, self.reason = seq, state, reason
        self.ts, self.updated = ts, now
