"""A depot: a store and the link that leads to it, with the copies under way between the two.

Private to a worker, or owned by a ``Timeline`` and lent to several. A copy ends in two moments. It *arrives* at the instant
at which its transfer lands, whoever lets time pass: what follows from it on links is sent then, and a shared store has it
from then on. It is *delivered* when the worker that asked for it next ticks: what only that worker sees changes then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import IntEnum

from kvyard.blocks import Request
from kvyard.blocks.table import Table
from kvyard.events.types import Sink, Tier
from kvyard.tiers.announce import ChunkSink
from kvyard.tiers.config import TierConfig
from kvyard.tiers.layout import Layout
from kvyard.tiers.links import Direction, Link, Transfer, make_link
from kvyard.tiers.piece import Piece
from kvyard.tiers.store import TierStore


class Kind(IntEnum):
    """What a copy is for. Outward copies fill the depot's store, inward ones are read from it."""

    STORE = 0
    """Device to host."""
    LOAD = 1
    """Host to device."""
    SPILL = 2
    """Host to storage."""
    FETCH = 3
    """Storage to host."""


_INWARD = (Kind.LOAD, Kind.FETCH)


class Copy:
    """One transfer's worth of pages on their way. It holds its source and its destination until it has landed (I6)."""

    __slots__ = (
        "arrive",
        "blocks",
        "ended",
        "far",
        "first_block",
        "inbox",
        "kind",
        "nbytes",
        "near",
        "pieces",
        "queued",
        "request",
        "rest",
        "returns",
        "tokens",
        "worker",
    )

    def __init__(
        self, kind: Kind, worker: str, inbox: deque[Copy], pieces: list[Piece], near: list[Table], far: list[Table]
    ) -> None:
        self.kind = kind
        self.worker = worker
        self.inbox = inbox
        """Of the worker that asked: where the copy goes when it has landed."""
        self.pieces = pieces
        self.near = near
        """What it holds on the side of the compute, a table per piece."""
        self.far = far
        """What it holds in the depot's store, a table per piece."""
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
        """Who waits for it."""
        self.tokens = 0
        """What a load makes of the request: so many computed tokens."""
        self.first_block: list[int] = []
        """Of a load, per piece: the first block that is brought (the page may begin earlier)."""


class Depot:
    """``store`` behind ``link``."""

    def __init__(self, store: TierStore, link: Link) -> None:
        self.store = store
        self.link = link
        self.under_way: dict[Transfer, Copy] = {}
        self.origins: dict[int, str] | None = None
        """Which worker stored each page, where that is of interest: in a shared store."""
        self.watch: Callable[[Copy], None] | None = None
        """Told of each copy as it lands, while both its ends are held: for whoever keeps contents."""
        self.landings = 0
        """How many copies have landed so far: whoever waits for somebody else's asks again when it changes,"""
        self.last_landing = 0
        """and when the last one did."""
        self._now = 0

    def submit(self, now: int, copy: Copy) -> None:
        """Send ``copy`` on its way. A shared link that has been told a later time takes it at that time."""
        direction = Direction.IN if copy.kind in _INWARD else Direction.OUT
        if now < self._now:
            now = self._now
        self._now = now
        transfer = self.link.submit(now, direction, copy.nbytes, copy.worker, 0, copy.blocks or 1)
        self.under_way[transfer] = copy

    def earliest(self) -> int | None:
        """When the next copy lands, if nothing changes."""
        return self.link.earliest()

    def advance(self, now: int) -> bool:
        """Land what is due by ``now``; returns whether anything was. Time that has passed already is no news."""
        if now < self._now:
            return False
        self._now = now
        self.store.clock.sleep_until(now)
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
            if self.shared:
                self.settle(copy)
            copy.inbox.append(copy)
            self.landings += 1
            self.last_landing = copy.ended
        return bool(landed)

    def settle(self, copy: Copy) -> None:
        """Do the store's side of a copy that has landed: what came in can be found, what was read may be evicted."""
        if copy.kind in _INWARD:
            for held in copy.far:
                self.store.let_go(held)
            return
        for piece, held in zip(copy.pieces, copy.far):
            if self.origins is not None:
                self.origins.update((page, copy.worker) for extent in held for page in extent.ids)
            self.store.land(piece, held)

    @property
    def shared(self) -> bool:
        """Whether several workers use it."""
        return self.origins is not None

    def foreign(self, copy: Copy) -> int:
        """How many of the pages that ``copy`` reads were stored by another worker."""
        origins = self.origins
        if origins is None:
            return 0
        return sum(origins.get(page) != copy.worker for held in copy.far for extent in held for page in extent.ids)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless everything under way holds what it reads or fills, and the store is sound."""
        for transfer, copy in self.under_way.items():
            for held in copy.far:
                assert held in self.store.pool.holds, (
                    f"I6: {transfer} has let go of its pages in {self.store.tier.name}"
                )
        self.store.check_integrity()
        self.link.check_integrity()


def make_depot(config: TierConfig, tier: Tier, layout: Layout, sink: Sink | None, events: str) -> Depot:
    """An empty tier for blocks of ``layout``. Raises ``ConfigError``."""
    if sink is not None and layout.chunk > 1 and events == "self-describing":
        sink = ChunkSink(sink, layout.block_sizes)
    pages = layout.pages(config.capacity(layout.block_bytes))
    store = TierStore(tier, pages, layout.num_groups, eviction=config.eviction, sink=sink)
    return Depot(store, make_link(config.link))
