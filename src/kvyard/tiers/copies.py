"""Copies under way on a link, whatever is at its two ends.

A copy holds its source and its destination until it has landed (I6). It ends in two moments. It *arrives* at the instant at
which its transfer lands, no matter who lets time pass: what follows from it on links is sent then. It is *delivered* when the
worker that asked for it next ticks: what only that worker sees changes then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from kvyard.blocks import Request
from kvyard.blocks.table import Table
from kvyard.tiers.links import Direction, Link, Transfer
from kvyard.tiers.pages import PageRange


class Copy:
    """One transfer's worth of pages on their way."""

    def __init__(
        self,
        level: int,
        direction: Direction,
        worker: str,
        inbox: deque[Copy],
        pieces: list[PageRange],
        near: list[Table],
        far: list[Table],
    ) -> None:
        self.level = level
        """Which tier's link it takes: 0 is the one next to the device."""
        self.direction = direction
        """``OUT`` fills the far end, ``IN`` reads from it."""
        self.worker = worker
        self.inbox = inbox
        """Of the worker that asked: where the copy goes when it has landed."""
        self.pieces = pieces
        self.near = near
        """What it holds at the end closer to the compute, a table per piece."""
        self.far = far
        """What it holds at the other end, a table per piece."""
        self.blocks = 0
        self.nbytes = 0
        self.ended = 0
        self.queued = 0
        self.rest: list[Copy] = []
        """The batches that follow, one after the other."""
        self.arrive: Callable[[Copy], None] | None = None
        """What to do at the instant it lands: send what follows from it."""
        self.returns = False
        """Whether its source came from the head of the device's free line, and goes back there."""
        self.request: Request | None = None
        """The request that waits for it."""
        self.tokens = 0
        """What a load makes of the request: so many computed tokens."""
        self.first_block: list[int] = []
        """Of a load, per piece: the first block that is brought (the page may begin earlier)."""


class CopyQueue:
    """A link between two named ends, and the copies under way on it."""

    def __init__(self, ends: tuple[str, str], link: Link) -> None:
        self.ends = ends
        """The end closer to the compute and the other; between workers, either."""
        self.link = link
        self.under_way: dict[Transfer, Copy] = {}
        self.watch: Callable[[Copy], None] | None = None
        """Called with each copy as it lands, while both its ends are held: for tests that keep contents."""
        self.landings = 0
        """How many copies have landed so far: requests that wait for another worker's copy ask again when it changes."""
        self.last_landing = 0
        """When the last one did."""
        self._now = 0

    def submit(self, now: int, copy: Copy) -> None:
        """Send ``copy`` on its way. A shared link that has been told a later time takes it at that time."""
        if now < self._now:
            now = self._now
        self._now = now
        transfer = self.link.submit(now, copy.direction, copy.nbytes, copy.worker, copy.blocks or 1)
        self.under_way[transfer] = copy

    def earliest(self) -> int | None:
        """When the next copy lands, if nothing changes."""
        return self.link.earliest() if self.under_way else None

    def advance(self, now: int) -> bool:
        """Land what is due by ``now``; returns whether anything was. Nothing happens for a time that has passed already."""
        if now < self._now:
            return False
        self._now = now
        landed = self.link.advance(now)
        for transfer in landed:
            copy = self.under_way.pop(transfer)
            assert transfer.ended is not None
            copy.ended = transfer.ended
            copy.queued = transfer.queued
            if self.watch is not None:
                self.watch(copy)
            if copy.arrive is not None:
                copy.arrive(copy)
            self.landed(copy)
            self.landings += 1
            self.last_landing = copy.ended
        return bool(landed)

    def landed(self, copy: Copy) -> None:
        """What the ends do at the instant at which ``copy`` lands."""
        raise NotImplementedError


def next_landing(queues: Sequence[CopyQueue]) -> int | None:
    """When the next copy lands in any of ``queues``, if nothing changes."""
    earliest: int | None = None
    for queue in queues:
        at = queue.earliest()
        if at is not None and (earliest is None or at < earliest):
            earliest = at
    return earliest
