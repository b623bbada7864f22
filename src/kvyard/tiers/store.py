"""A tier's store: the runs of chains that it holds, the transfers that hold them, and pages in flight to it.

Built from the block manager's own parts: a pool of pages and, per group, a map of copies. A page is ``blocks_per_chunk``
blocks; a chunk is named by the hash of its last block, so the chains here are the request's chains seen at that size. An
entry is *pending* from the moment a transfer towards it is planned until it lands: it can't be found, but it isn't stored
or fetched again either. Then it is *resident*, is announced, and may be evicted whenever no transfer reads it.

All work is per run. A store knows no links, no requests, and only the time that it receives.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvyard.blocks.cache_map import covered
from kvyard.blocks.extent import KEPT_THEN_FIRST, OVER, Extent, Node
from kvyard.blocks.hints import Hints
from kvyard.blocks.integrity import check_pool
from kvyard.blocks.ledger import NOBODY
from kvyard.blocks.ownership import claim
from kvyard.blocks.pool import Pool, RadixTree
from kvyard.blocks.quotas import Quotas
from kvyard.blocks.spans import Spans, clip, overlaps, without
from kvyard.blocks.spec import ConfigError
from kvyard.blocks.table import BlockTable
from kvyard.blocks.use import Use
from kvyard.clock import VirtualClock
from kvyard.events.types import Sink, Tier
from kvyard.hashing import Chain, Key, Keys, Run
from kvyard.hashing.prefix_tree import agree_until
from kvyard.integers import ceil_div


class PageRange:
    """Pages ``start`` to ``stop`` of one group of one chain. Immutable by convention."""

    __slots__ = ("chain", "group", "start", "stop")

    def __init__(self, group: int, chain: Chain, start: int, stop: int) -> None:
        self.group = group
        self.chain = chain
        self.start = start
        self.stop = stop

    def __repr__(self) -> str:
        return f"PageRange({self.start}..{self.stop} of group {self.group})"


def total_pages(pieces: Iterable[PageRange]) -> int:
    """Return the number of pages in ``pieces``."""
    total = 0
    for piece in pieces:
        total += piece.stop - piece.start
    return total


class PendingPages:
    """The ranges of one group that are on their way somewhere, and must not be sent there again.

    There are few at a time and they never overlap, so they are kept by where they start and compared by hash: equal at a
    position means equal before it.
    """

    __slots__ = ("_starts",)

    def __init__(self) -> None:
        self._starts: dict[int, dict[Key, PageRange]] = {}

    def add(self, piece: PageRange) -> None:
        """Add ``piece``. No part of it may be in flight already."""
        key = piece.chain.keys[piece.start]
        here = self._starts.get(piece.start)
        if here is None:
            self._starts[piece.start] = {key: piece}
            return
        assert key not in here, f"{piece} is sent twice"
        here[key] = piece

    def remove(self, piece: PageRange) -> None:
        """Remove ``piece``, which has arrived, or won't."""
        here = self._starts[piece.start]
        key = piece.chain.keys[piece.start]
        if len(here) == 1 and key in here:
            del self._starts[piece.start]
        else:
            del here[key]

    def spans(self, keys: Keys, limit: int) -> Spans:
        """Return the intervals of a chain's first ``limit`` positions that are on their way."""
        spans: list[tuple[int, int]] = []
        for start, here in self._starts.items():
            if start < limit:
                piece = here.get(keys[start])
                if piece is not None:
                    stop = piece.stop if piece.stop < limit else limit
                    spans.append((start, agree_until(piece.chain.keys, keys, start, stop)))
        return clip(spans, 0, limit) if len(spans) > 1 else spans

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __iter__(self) -> Iterator[PageRange]:
        for here in self._starts.values():
            yield from here.values()


class TierStore:
    """``num_pages`` pages for ``num_groups`` groups."""

    def __init__(
        self,
        tier: Tier,
        num_pages: int,
        num_groups: int,
        *,
        eviction: str = "lru",
        eviction_options: Mapping[str, float] | None = None,
        states: Sequence[int] = (),
        sink: Sink | None = None,
        radix: RadixTree | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        """``sink`` receives pages that become resident and pages that leave; ``states`` are the groups whose pages each
        stand for all that comes before them. ``radix``, ``quotas``: see ``Pool``. Raises ``ConfigError`` for a store
        without a page.
        """
        if num_pages < 1:
            raise ConfigError(f"a {tier.name} store needs room for at least one page, got {num_pages}")
        self.tier = tier
        self.num_pages = num_pages
        self.clock = VirtualClock()
        """Receives the time as it passes, for eviction policies that use it."""
        self.pool = Pool(
            num_pages + 1,
            num_groups,
            eviction=eviction,
            eviction_options=eviction_options,
            sink=sink,
            tier=tier,
            now=self.clock.now,
            radix=radix,
            quotas=quotas,
        )
        self._states = states
        self._by_recency = eviction == "lru" and quotas is None
        self.keeps_by_priority = self.pool.order.reads_priorities
        """True if evictions depend on priorities, which pages here have from their source."""
        self.pending = [PendingPages() for _ in range(num_groups)]
        """Pages in flight to the store, which can't be found yet."""
        self.reserved: dict[BlockTable, PageRange] = {}
        """The pages that wait for it."""
        self._behind: dict[BlockTable, Extent] = {}
        """Extent right before them, if it was here or in flight when they were reserved: a place to look from when they
        land."""
        self._walked: tuple[Keys, int, int, int, int] | None = None
        """The latest walk (whose, how far, in which group, and what the map was like), since a store asks what is missing and
        then makes recent what is not,"""
        self._found: tuple[list[Node], int] = ([], 0)
        """and what it came to."""
        self.arrivals = 0
        """Counts what became resident: requests that wait for something ask again when it has changed."""
        self.evicted = 0
        """Pages evicted to make room."""
        self.reservations = 0
        """Number of times that room was made: pages are in flight from then on, and others may be gone."""

    def set_time(self, now: int) -> None:
        """Set the time to ``now``, for eviction policies that use it, and for the ledger. Policies that go by recency alone
        don't receive it.
        """
        if not self._by_recency or self.pool.ledger is not None:
            self.clock.sleep_until(now)

    # -- asking: nothing changes, recency neither ---------------------------------------------------------------------

    def resident(self, group: int, keys: Keys, limit: int) -> Spans:
        """Return the intervals of a chain's first ``limit`` pages that are here and whole."""
        nodes, end = self._walk(group, keys, min(limit, len(keys)))
        return covered(nodes, end)

    def _walk(self, group: int, keys: Keys, limit: int) -> tuple[list[Node], int]:
        """``CacheMap.walk``, of which the latest is remembered. Nodes come and go by their number, or by the version."""
        cache_map = self.pool.maps[group]
        last = self._walked
        if (
            last is None
            or last[0] is not keys
            or last[1] != limit
            or last[2] != group
            or last[3] != cache_map.version
            or last[4] != len(cache_map.starts)
        ):
            self._walked = (keys, limit, group, cache_map.version, len(cache_map.starts))
            self._found = cache_map.walk(keys, limit)
        return self._found

    def on_the_way(self, group: int, keys: Keys, limit: int) -> Spans:
        """Return the intervals of a chain's first ``limit`` pages that a transfer is bringing."""
        pending = self.pending[group]
        return pending.spans(keys, min(limit, len(keys))) if pending else ()

    def missing(self, group: int, keys: Keys, first: int, last: int) -> list[tuple[int, int]]:
        """Return the intervals of pages ``first`` to ``last`` that are neither here nor on the way."""
        left = without(first, last, self.resident(group, keys, last))
        pending = self.on_the_way(group, keys, last) if left else ()
        if not pending:
            return left
        return [span for low, high in left for span in without(low, high, pending)]

    # -- using --------------------------------------------------------------------------------------------------------

    def touch(self, group: int, chain: Chain, limit: int, use: Use | None = None) -> int:
        """Make the first ``limit`` pages of ``chain`` that are here the most recently used, the head last: a request
        matched them.

        An eviction policy that learns receives its ``use``, if that is given. Returns how many of the pages are free to be
        evicted.
        """
        return self._make_recent(group, chain, self._first_copies(group, chain.keys, limit), use)

    def _make_recent(self, group: int, chain: Chain, extents: list[Extent], use: Use | None) -> int:
        pool = self.pool
        free = 0
        if use is not None and pool.learner is not None:
            free = sum([len(extent.ids) for extent in extents if not extent.refs])
            held = pool.holds.pin(extents)  # the policy may split them
            self._note_use(group, chain, held, use)
            pool.holds.end(held)
            return free
        for extent in reversed(extents):
            if not extent.refs:
                pool.renew(extent)
                free += len(extent.ids)
        return free

    def _note_use(self, group: int, chain: Chain, held: BlockTable, use: Use) -> None:
        learner = self.pool.learner
        if learner is not None:
            learner.used(held.settle(), use, chain.block_size, group in self._states)

    def _first_copies(self, group: int, keys: Keys, limit: int) -> list[Extent]:
        """Return the copies of a chain's first ``limit`` pages that are here, one of each, in order of position."""
        nodes, end = self._walk(group, keys, limit)
        if nodes and nodes[-1].stop > end:
            nodes = [*nodes[:-1], self.pool.maps[group].split(nodes[-1], end)]
        return [node.copies[0] for node in nodes if node.copies]

    def hold(self, piece: PageRange) -> BlockTable:
        """Keep ``piece``, all of it resident, for a transfer that reads it, until ``pool.holds.end``.

        Its pages are the most recently used then.
        """
        return hold_pages(self.pool, piece)

    def reserve(
        self, pieces: Sequence[PageRange], use: Use | None = None, behind: Extent | None = None
    ) -> list[BlockTable] | None:
        """Make room for all of ``pieces`` at once and note them as pending; ``None``, changing nothing but recency, if they
        can't be had now. ``use``: for which request. ``behind``: what was reserved last for the same chain and may be on its
        way still, which makes it quicker to find where they belong when they land.

        Neither what transfers hold nor what is here of the same chains is evicted for it.
        """
        count = total_pages(pieces)
        pool = self.pool
        spare = pool.free
        chains: list[PageRange] = []
        last: Extent | None = None
        for piece in reversed(pieces):
            if chains and piece.chain is chains[-1].chain and piece.group == chains[-1].group:
                continue  # part of what the later piece has touched
            chains.append(piece)
            extents = self._first_copies(piece.group, piece.chain.keys, piece.stop)
            spare -= self._make_recent(piece.group, piece.chain, extents, use)
            if extents and len(pieces) == 1 and extents[-1].stop == piece.start:
                last = extents[-1]
        account = self._account(use)
        if pool.quota is not None:
            spare = min(spare, pool.quota.room(account, pool.unnamed) - (pool.free - spare))
        if count > spare:
            return None
        if last is None and behind is not None and len(pieces) == 1 and behind.stop == pieces[0].start:
            last = behind
        # At the end of a line by recency what was touched is safe, since enough else is left to evict. Other orders differ.
        own: list[BlockTable] = []
        if not self._by_recency:
            for piece in chains:
                own.append(pool.holds.pin(self._first_copies(piece.group, piece.chain.keys, piece.stop)))
        self.evicted += max(0, count - pool.unnamed)
        self.reservations += 1
        tables: list[BlockTable] = []
        for piece in pieces:
            self.pending[piece.group].add(piece)
            held = pool.holds.take(piece.stop - piece.start, piece.start, account)
            self.reserved[held] = piece
            if last is not None:
                self._behind[held] = last
            tables.append(held)
        for held in own:
            pool.holds.end(held)
        return tables

    def _account(self, use: Use | None) -> int:
        """Return the account that is charged for pages which are taken for ``use``."""
        if use is None or not use.facts.tenant:
            return NOBODY
        return self.pool.open_ledger().account(use.facts.tenant)

    def inherit(self, held: BlockTable, sources: BlockTable, chunk: int) -> None:
        """Keep what will come into ``held`` as long as ``sources`` are kept, from which it is copied: the same priorities.

        A page here is ``chunk`` of theirs. For stores that keep by priority.
        """
        [rest] = held.settle()
        for source in sources.settle():
            stop = min(ceil_div(source.stop, chunk), rest.stop)
            if stop > rest.start:
                part = rest if stop == rest.stop else self.pool.split(rest, stop - rest.start)
                if (
                    OVER < source.priority < KEPT_THEN_FIRST
                ):  # hints are for each tier to learn when the request has ended
                    part.priority, part.expires = source.priority, source.expires

    def claim(self, group: int, keys: Keys, limit: int, session: str, hints: Hints) -> None:
        """A request of ``session`` has ended: note that it used what is here of its first ``limit`` pages, and what ``hints``
        say of them.
        """
        claim(self.pool.order, self._first_copies(group, keys, limit), session, hints)

    def land(self, piece: PageRange, held: BlockTable, keep: bool = False, use: Use | None = None) -> None:
        """Make what was reserved available after a transfer filled it, and evictable unless ``keep``. ``use``: the request, if
        known.
        """
        self.pending[piece.group].remove(piece)
        del self.reserved[held]
        behind = self._behind.pop(held, None) if self._behind else None
        enter_pages(self.pool, piece, held, behind if behind is not None and _leads_to(behind, piece) else None)
        if self.pool.learner is not None:
            size = piece.chain.block_size
            self._note_use(piece.group, piece.chain, held, use or Use("", piece.stop * size))
        self.arrivals += 1
        if not keep:
            self.pool.holds.end(held)

    def cancel(self, piece: PageRange, held: BlockTable) -> None:
        """Free the reserved pages of a copy that won't come."""
        self.pending[piece.group].remove(piece)
        del self.reserved[held]
        self._behind.pop(held, None)
        self.pool.holds.end(held)

    def put(self, piece: PageRange) -> None:
        """Have ``piece`` here at once, one more copy if it is here already; not where there is no room."""
        count = piece.stop - piece.start
        if count <= self.pool.free:
            held = self.pool.holds.take(count, piece.start)
            enter_pages(self.pool, piece, held)
            self.pool.holds.end(held)

    # -- reporting ----------------------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Pages that hold something, or are reserved for it."""
        return self.num_pages - self.pool.unnamed

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless pages are conserved (I2), counts are true (I1) and pending is what holds say."""
        references = Counter(extent for held in self.pool.holds.tables for extent in held)
        check_pool(self.pool, references)
        assert self.reserved.keys() <= self.pool.holds.tables, "a page is reserved and not held"
        assert set(self.reserved.values()) == {piece for some in self.pending for piece in some}, (
            "pending, without a page"
        )
        for held, piece in self.reserved.items():
            assert sum(len(extent.ids) for extent in held) == piece.stop - piece.start, f"{piece} has lost pages"
            present = self.resident(piece.group, piece.chain.keys, piece.stop)
            assert not overlaps(piece.start, piece.stop, present), f"{piece} is pending and here"


def hold_pages(pool: Pool, piece: PageRange) -> BlockTable:
    """Hold all blocks of ``piece``, which are in ``pool``, for a transfer that reads them, until ``holds.end``. Raises
    ``LookupError`` if some of them are missing.
    """
    start, stop = piece.start, piece.stop
    cache_map = pool.maps[piece.group]
    nodes, pages = cache_map.walk(piece.chain.keys, stop)
    if pages < stop:
        raise LookupError(f"{pool.tier.name} has {pages} pages of this chain, not {stop}")
    nodes = cache_map.between(nodes, start, stop)
    for node in nodes:
        if not node.copies:
            raise LookupError(f"{pool.tier.name} has a hole at page {node.start} of this chain")
    return pool.holds.pin([node.copies[0] for node in nodes])


def _leads_to(extent: Extent, piece: PageRange) -> bool:
    """Return true if ``extent``, which came right before ``piece`` once, is still a copy of something earlier on its chain."""
    node = extent.node
    return node is not None and node.stop <= piece.start and node.keys[node.stop - 1] == piece.chain.keys[node.stop - 1]


def enter_pages(pool: Pool, piece: PageRange, held: BlockTable, before: Extent | None = None) -> None:
    """Make ``held``, which was filled with ``piece``, available. ``before``: see ``CacheMap.enter``."""
    chain = piece.chain
    resident = pool.maps[piece.group]
    for extent in held.settle():
        for part in resident.enter(chain, extent, before):
            node = part.node
            if node is not None and node.chain is chain:
                # What outlives the request lets go of the rest of its chain.
                resident.detach(node, chain)


class ChunkSink:
    """Passes the events of a store of chunks on to ``sink``, as runs of blocks of ``block_sizes`` tokens per group.

    Two chunks of different texts may share their first blocks, when a common prefix ends inside a chunk; both list them, so
    that block is announced twice and removed twice, and readers must count (llm-d #680). Offload connectors of real engines
    do the same.
    """

    def __init__(self, sink: Sink, block_sizes: Sequence[int]) -> None:
        self._sink = sink
        self._sizes = block_sizes

    def entered(self, run: Run, group: int, tier: Tier, first: bool) -> None:
        """Announce each chunk's blocks, whether or not another chunk has announced some of them."""
        self._sink.entered(blocks_of(run, self._sizes[group]), group, tier, first)

    def left(self, run: Run, group: int, tier: Tier, last: bool, reason: str | None = None) -> None:
        """Take back each chunk's blocks, as often as they were announced."""
        self._sink.left(blocks_of(run, self._sizes[group]), group, tier, last, reason)

    def cleared(self, tier: Tier | None = None) -> None:
        """Note that the tier is empty."""
        self._sink.cleared(tier)


def blocks_of(run: Run, block_size: int) -> Run:
    """``run``, whose blocks are chunks, as the run of the blocks of ``block_size`` tokens that they are made of."""
    chain: Chain = run.chain.finer(block_size)
    factor = run.chain.block_size // block_size
    return Run(chain, run.start * factor, run.stop * factor)
