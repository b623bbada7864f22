"""Requests to a publisher, one after the other, and its answers so far.

An inquiry follows a plan, the kinds of request to try in turn. It numbers requests, so that late replies to an abandoned
request are recognised, counts attempts and knows when a request has timed out. Whether an answer helps is decided in
``recovery``.
"""

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum

import msgspec

from kvyard.events.packed import PackedEvents
from kvyard.events.transport.frames import HEAD_WORD, SNAPSHOT_WORD, Reply, ReplyKind, StreamHead
from kvyard.events.transport.position import StreamPosition
from kvyard.events.transport.state import Limits
from kvyard.events.wire import Decoded

LEAST_BYTES = 4096
"""Bytes that a part of a snapshot counts for at least."""


class RequestKind(IntEnum):
    HEAD = 1
    REPLAY = 2
    SNAPSHOT = 3
    REBUILD = 4
    """Replay from the very beginning."""


class ReplayRequest(msgspec.Struct, frozen=True):
    """Request that should be in flight. One with another number replaces it; replies to the old one are discarded."""

    number: int
    kind: RequestKind
    word: bytes | int


class Snapshot:
    """Parts of a snapshot that have arrived, as packed events."""

    def __init__(self) -> None:
        self.parts = 0
        self.bytes = 0
        self.events = PackedEvents()
        self.rank: int | None = None
        """Rank of the first part."""
        self.lossy = False
        """True if a part couldn't be read in full."""

    def add(self, part: Decoded) -> None:
        if not self.parts:
            self.rank = part.rank
        self.parts += 1
        self.lossy |= part.lossy
        self.events.extend(part.events)


class Inquiry:
    """Requests of one stream, at most one of them in flight."""

    def __init__(self, limits: Limits, numbers: Iterator[int], read: Callable[[bytes], Decoded]) -> None:
        """``read`` decodes a part of a snapshot."""
        self.request: ReplayRequest | None = None
        self.due = 0
        """Time at which the request in flight has failed."""
        self.knows_words: bool | None = None
        """True if the publisher knows heads and snapshots; ``None`` until it was asked."""
        self.applied = -1
        """Position of the reader at the time of the request."""
        self.order = 0
        """Batches that had arrived by then."""
        self.witness: int | None = None
        """The batch that was asked for only to identify the publisher."""
        self.confirmed = False
        """True if the reply had the known fingerprint."""
        self.batches = 0
        """Replayed so far."""
        self.furthest = -1
        self.head: StreamHead | None = None
        self.snapshot = Snapshot()
        self.tries = 0
        self.failures: list[str] = []
        """Why what was tried so far didn't help."""
        self._limits = limits
        self._numbers = numbers
        self._read = read
        self._attempts = 1
        self._plan: list[RequestKind] = []

    def begin(self, plan: Sequence[RequestKind], attempts: int) -> None:
        """Start over, with nothing asked yet; each kind is tried ``attempts`` times."""
        self.request, self._plan, self.tries = None, list(plan), 0
        self._attempts = attempts
        self.failures = []

    def send(self, position: StreamPosition, order: int, now: int) -> bool:
        """Make the plan's first request that makes sense. Returns whether there was one."""
        plan = self._plan
        while plan and plan[0] in (RequestKind.HEAD, RequestKind.SNAPSHOT) and self.knows_words is False:
            plan.pop(0)
        if not plan:
            self.request = None
            return False
        kind = plan[0]
        self.witness = position.witness if kind == RequestKind.REPLAY else None
        word: bytes | int
        if kind == RequestKind.REPLAY:
            word = position.applied + 1 if self.witness is None else self.witness
        else:
            word = {RequestKind.HEAD: HEAD_WORD, RequestKind.SNAPSHOT: SNAPSHOT_WORD}.get(kind, 0)
        self.request = ReplayRequest(next(self._numbers), kind, word)
        self.applied, self.order = position.applied, order
        self.confirmed = False
        self.batches, self.furthest = 0, -1
        self.head, self.snapshot = None, Snapshot()
        self.due = now + self._limits.reply
        return True

    def take(self, reply: Reply, now: int) -> None:
        """Record a reply to the request in flight; the request gets more time."""
        self.due = now + self._limits.reply
        if reply.kind == ReplyKind.BATCH:
            self.batches += 1
            self.furthest = max(self.furthest, reply.seq)
        elif reply.kind == ReplyKind.HEAD:
            self.head = reply.head
        elif reply.kind == ReplyKind.PART and self.head is not None and self.snapshot.parts < self.head.parts:
            self._add_part(reply.payload)

    def _add_part(self, payload: bytes) -> None:
        snapshot = self.snapshot
        if snapshot.bytes > self._limits.snapshot_bytes:
            return
        snapshot.bytes += max(len(payload), LEAST_BYTES)
        if snapshot.bytes > self._limits.snapshot_bytes:
            snapshot.events = PackedEvents()  # of no use
            snapshot.lossy = True
            return
        snapshot.add(self._read(payload))

    def failed(self, why: str, final: bool = False) -> None:
        """Note that the request failed; go on to the next kind after some attempts, or at once if that is ``final``."""
        if why not in self.failures:
            self.failures.append(why)
        self.tries += 1
        if final or self.tries >= self._attempts:
            self.skip()

    def skip(self) -> None:
        """Go on to the next kind of request."""
        self.tries = 0
        self._plan.pop(0)

    def take_snapshot(self) -> Snapshot:
        """Return what arrived of a snapshot, which isn't kept."""
        snapshot, self.snapshot = self.snapshot, Snapshot()
        return snapshot

    @property
    def replays(self) -> bool:
        """Return true if batches are being requested."""
        return self.request is not None and self.request.kind in (RequestKind.REPLAY, RequestKind.REBUILD)

    def stop(self) -> None:
        self.request = None
        self._plan = []
