"""Copies in flight on a link, whatever is at its two ends.

A copy holds its source and its destination until it has landed (I6). It ends in two moments. It *arrives* at the instant at
which its transfer lands, no matter who advances time: copies that follow from it are submitted then. It is *delivered* when
the worker that asked for it next ticks: what only that worker sees changes then.

A link leads to the store of a tier (``LinkedTier``) or joins the devices of two workers (``WorkerLink``).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kvyard.blocks import Request
from kvyard.blocks.extent import Extent
from kvyard.blocks.pool import Pool, RadixTree
from kvyard.blocks.table import BlockTable
from kvyard.blocks.use import Use
from kvyard.events.types import Sink, Tier
from kvyard.tiers.config import TierConfig
from kvyard.tiers.layout import PageLayout
from kvyard.tiers.links import Direction, Link, LinkConfig, Transfer, make_link
from kvyard.tiers.store import ChunkSink, PageRange, TierStore, enter_pages


class Copy:
    """One transfer's worth of pages on their way."""

    def __init__(
        self,
        level: int,
        direction: Direction,
        worker: str,
        inbox: "deque[Copy]",
        pieces: list[PageRange],
        near: list[BlockTable],
        far: list[BlockTable],
    ) -> None:
        self.level = level
        """Tier whose link it takes: 0 is the one next to the device."""
        self.direction = direction
        """``OUT`` fills the far end, ``IN`` reads from it."""
        self.inward = direction is Direction.IN
        self.worker = worker
        self.inbox = inbox
        """Of the worker that asked: where the copy goes when it has landed."""
        self.pieces = pieces
        self.near = near
        """Tables held at the end closer to the compute, one per piece."""
        self.far = far
        """Tables held at the other end, one per piece."""
        self.blocks = 0
        self.nbytes = 0
        self.ended = 0
        self.queued = 0
        self.rest: list[Copy] = []
        """The batches that follow, one after the other."""
        self.arrive: Callable[[Copy], None] | None = None
        """Called at the instant it lands: submits copies that follow from it."""
        self.began = 0
        """Of a pull: when it did."""
        self.failed = False
        """Of a pull: its source is gone, and nothing came."""
        self.returns = False
        """True if its source came from the head of the line of eviction, and goes back there."""
        self.moves = False
        """True if what it loads leaves the store when it has landed."""
        self.request: Request | None = None
        """The request that waits for it."""
        self.use: Use | None = None
        """Use by a request, for eviction policies that learn at its other end."""
        self.tokens = 0
        """Computed tokens of the request after a load."""
        self.first_block: list[int] = []
        """Of a load, per piece: the first block that is brought (the page may begin earlier)."""


class CopyQueue:
    """Link between two named ends, and the copies in flight on it."""

    def __init__(self, ends: tuple[str, str], link: Link) -> None:
        self.ends = ends
        """The end closer to the compute and the other; between workers, either."""
        self.link = link
        self.in_flight: dict[Transfer, Copy] = {}
        self.watch: Callable[[Copy], None] | None = None
        """Called with each copy as it lands, while both its ends are held: for tests that keep contents."""
        self.landings = 0
        """Copies that have landed so far: requests that wait for another worker's copy ask again when it changes."""
        self.last_landing = 0
        """Time of the last landing."""
        self._now = 0

    def submit(self, now: int, copy: Copy) -> None:
        """Submit ``copy``. A shared link whose time is later takes it at that time."""
        if now < self._now:
            now = self._now
        self._now = now
        transfer = self.link.submit(now, copy.direction, copy.nbytes, copy.worker, copy.blocks or 1)
        self.in_flight[transfer] = copy

    def earliest(self) -> int | None:
        """Return when the next copy lands, if nothing changes."""
        return self.link.earliest() if self.in_flight else None

    def advance(self, now: int) -> bool:
        """Land what is due by ``now``; returns whether anything was. Nothing happens for a time that has passed already."""
        if now < self._now:
            return False
        self._now = now
        landed = self.link.advance(now)
        for transfer in landed:
            copy = self.in_flight.pop(transfer)
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
        """Act on both ends at the instant at which ``copy`` lands."""
        raise NotImplementedError


def next_landing(queues: Sequence[CopyQueue]) -> int | None:
    """Return when the next copy lands in any of ``queues``, if nothing changes."""
    earliest: int | None = None
    for queue in queues:
        landing = queue.earliest()
        if landing is not None and (earliest is None or landing < earliest):
            earliest = landing
    return earliest


class LinkedTier(CopyQueue):
    """``store`` behind ``link``, which leads to it from the next closer tier.

    Private to a worker, or owned by a ``Timeline`` and lent to several. A shared store has a copy from the instant it lands,
    a private one from when its worker next ticks.
    """

    def __init__(self, store: TierStore, link: Link, shared: bool = False) -> None:
        super().__init__((Tier(store.tier - 1).name, store.tier.name), link)
        self.store = store
        self.shared = shared
        """True if several workers use it."""
        self.origins: dict[int, str] = {}
        """In a shared store: which worker stored each page."""

    def advance(self, now: int) -> bool:
        if now >= self._now:
            self.store.set_time(now)
        return super().advance(now)

    def landed(self, copy: Copy) -> None:
        if self.shared:
            self.settle(copy)
        copy.inbox.append(copy)

    def settle(self, copy: Copy) -> None:
        """Do the store's side of a copy that has landed: what came in can be found, what was read may be evicted."""
        if copy.inward:
            # A request that has gone meanwhile leaves what it loaded nowhere but here.
            pool = self.store.pool
            release = pool.holds.end_move if copy.moves and copy.request is not None else pool.holds.end
            for held in copy.far:
                release(held)
            return
        for piece, held in zip(copy.pieces, copy.far):
            if self.shared:
                self.origins.update((page, copy.worker) for extent in held for page in extent.ids)
            self.store.land(piece, held, use=copy.use)

    def foreign(self, copy: Copy) -> int:
        """Return the number of pages that ``copy`` reads which another worker stored."""
        if not self.shared:
            return 0
        return sum(self.origins.get(page) != copy.worker for held in copy.far for extent in held for page in extent.ids)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless every copy in flight holds what it reads or fills, and the store is sound."""
        for transfer, copy in self.in_flight.items():
            for held in copy.far:
                assert held in self.store.pool.holds.tables, (
                    f"I6: {transfer} has released its pages in {self.store.tier.name}"
                )
        self.store.check_integrity()
        self.link.check_integrity()


LinkMaker = Callable[[LinkConfig], Link]
"""Makes a link of its config."""


def make_tier(
    config: TierConfig,
    tier: Tier,
    layout: PageLayout,
    sink: Sink | None,
    events: str,
    linked: LinkMaker = make_link,
    radix: RadixTree | None = None,
) -> LinkedTier:
    """Return an empty tier for blocks of ``layout``, behind what ``linked`` makes. ``radix``: see ``Pool``. Raises
    ``ConfigError``.
    """
    if sink is not None and layout.chunk > 1 and events == "self-describing":
        sink = ChunkSink(sink, layout.block_sizes)
    pages = layout.pages(config.capacity(layout.block_bytes))
    store = TierStore(
        tier,
        pages,
        layout.num_groups,
        eviction=config.eviction,
        eviction_options=config.eviction_options,
        states=[index for index, group in enumerate(layout.manager.groups) if group.spec.is_state],
        sink=sink,
        radix=radix,
        quotas=config.quotas,
    )
    return LinkedTier(store, linked(config.link), config.scope == "shared")


class WorkerLink(CopyQueue):
    """Copies between the pools of two workers, in both directions. Here a page is a block.

    A transfer is like any other: its source is pinned and its destination reserved until it lands (I6), and it shares the
    link's bandwidth with all others (I7). Who sends what, and when, is for the caller to say.
    """

    def __init__(self, ends: tuple[str, str], pools: tuple[Pool, Pool], link: Link) -> None:
        super().__init__(ends, link)
        self.pools = pools
        self.inboxes: dict[str, deque[Copy]] = {name: deque() for name in ends}
        """By receiving worker, what has landed: its blocks are cached there and may be evicted like any others."""

    def send(self, now: int, sender: str, piece: PageRange, extents: Iterable[Extent], block_bytes: int) -> Copy | None:
        """Send the blocks of ``piece``, which are among the sender's ``extents``; ``None`` if the receiver has no room now.

        The sender is the client of the transfer, for links that limit what a client may use.
        """
        out = sender == self.ends[0]
        source, target = self.pools if out else self.pools[::-1]
        count = piece.stop - piece.start
        if count > target.free:
            return None
        sent = source.holds.pin(source.cut(extents, piece.start, piece.stop))
        received = target.holds.take(count, piece.start)
        near, far = (sent, received) if out else (received, sent)
        direction = Direction.OUT if out else Direction.IN
        inbox = self.inboxes[self.ends[1] if out else self.ends[0]]
        copy = Copy(0, direction, sender, inbox, [piece], [near], [far])
        copy.blocks, copy.nbytes = count, count * block_bytes
        self.submit(now, copy)
        return copy

    def landed(self, copy: Copy) -> None:
        """The receiver has the blocks cached, and the sender may evict its own."""
        target, received = (1, copy.far) if copy.direction == Direction.OUT else (0, copy.near)
        for piece, held in zip(copy.pieces, received):
            enter_pages(self.pools[target], piece, held)
        self._release_copy(copy)
        copy.inbox.append(copy)

    def held(self, pool: Pool) -> list[BlockTable]:
        """Return the tables that copies in flight hold of ``pool``, one of the two."""
        near = pool is self.pools[0]
        return [held for copy in self.in_flight.values() for held in (copy.near if near else copy.far)]

    def cancel_all(self, now: int) -> None:
        """Cancel every copy in flight, at a time that is not before the last: both ends are released, and nothing lands."""
        self.advance(now)
        for transfer, copy in self.in_flight.items():
            self.link.cancel(now, transfer)
            self._release_copy(copy)
        self.in_flight.clear()

    def _release_copy(self, copy: Copy) -> None:
        for pool, tables in zip(self.pools, (copy.near, copy.far)):
            for held in tables:
                pool.holds.end(held)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless every copy in flight holds both its ends (I6) and the link keeps I7."""
        for transfer, copy in self.in_flight.items():
            for name, pool, tables in zip(self.ends, self.pools, (copy.near, copy.far)):
                assert all(held in pool.holds.tables for held in tables), (
                    f"I6: {transfer} has released its blocks at {name}"
                )
        self.link.check_integrity()
