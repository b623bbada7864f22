"""Offloading on eviction, ahead of time: blocks near the head of the device's free line are copied before they are needed.

A block is *clean* if giving it up loses nothing: it has no name, or the first lower tier, the host, has it or is getting it.
While a block is copied it is out of the line; then it goes back to the head, where it can still be hit until it is taken. An
allocation that needs a block that isn't clean yet waits for its copy, or drops the content, as configured.

Cleaning always comes to an end. No more is kept clean than the host can hold (of a shared host: a member's part), and a block
is copied once until the device next gives one up: should the host lose it before, copying it again would only cost another.
"""

from collections.abc import Callable, Sequence
from math import ceil
from typing import Final, NamedTuple

from kvyard.blocks import Hit
from kvyard.blocks.cache_map import Node
from kvyard.blocks.extent import Extent
from kvyard.blocks.spans import without
from kvyard.blocks.table import BlockTable
from kvyard.clock import SECOND
from kvyard.tiers.path_chain import whole_chain
from kvyard.tiers.policy import WriteThrough
from kvyard.tiers.state import OffloadState
from kvyard.tiers.store import PageRange, PendingPages, total_pages
from kvyard.tiers.storer import Storer

DEFAULT_AHEAD = 64
_HALF_LIFE: Final = 10 * SECOND
"""Nanoseconds after which an allocation counts half."""


class _Dirty(NamedTuple):
    """Blocks of a free extent that the host doesn't have."""

    extent: Extent
    piece: PageRange
    depth: int
    """Blocks of the free list that go before the last of them does."""

    @property
    def size(self) -> int:
        return self.piece.stop - self.piece.start


class Cleaner:
    """Keeps the head of one worker's free line clean."""

    def __init__(self, state: OffloadState, storer: Storer, members: Sequence[str], policy: WriteThrough) -> None:
        """``members`` are the workers that the host is for."""
        self.state = state
        self.storer = storer
        self._members = members
        self._drops = (state.config.on_unclean or policy.unclean) == "drop"
        self._horizon = 0.0 if state.config.offload_ahead is not None else policy.horizon
        self._demand = 0.0
        """Blocks of the largest allocation lately, older ones counting less,"""
        self._demanded = 0
        """as of this time."""
        self.cohorts = 0
        """Sent so far. Each may have pushed out of the host what made other blocks clean."""
        self._copied = [PendingPages() for _ in range(state.layout.num_groups)]
        """Pages copied since the device last gave something up,"""
        self._given_up = 0
        """and how much it had evicted by then."""
        self._doomed: list[tuple[int, int]] = []
        """Blocks that go without a copy if they are taken: named blocks that go before, and their number."""
        self._stuck = -1
        """Copies that had landed when the host last had no room."""

    @property
    def ahead(self) -> int:
        """Return the number of blocks at the head of the free list that are to be clean."""
        share = max(1, self.state.first.num_pages // len(self._members))
        if self._horizon:
            return min(ceil(self._horizon * self._demand), share)
        return min(self.state.config.offload_ahead or DEFAULT_AHEAD, share)

    @property
    def copying(self) -> int:
        """Return the number of blocks that are off the free list because they are being copied."""
        copies = [part for copy in self.state.in_flight(0) if copy.returns for part in (copy, *copy.rest)]
        return sum([total_pages(copy.pieces) for copy in copies])

    def work(self, now: int) -> None:
        """Copy from the head of the line until enough blocks are clean, or will be."""
        self._notice()
        wanted = self.ahead - self.copying
        if wanted > 0:
            self._clean(self._survey(wanted), wanted, now)

    def make_clean(self, needed: int, now: int, deadline: Callable[[], int | None], hit: Hit | None) -> int | None:
        """See ``Offload.make_clean``."""
        self._notice()
        if self._horizon:
            self._demand = max(float(needed), self._demand * 0.5 ** ((now - self._demanded) / _HALF_LIFE))
            self._demanded = now
        counters, pool, copying = self.state.counters, self.state.layout.pool, self.copying
        pinned = sum(group.free_blocks(0) for group in hit.groups) if hit is not None else 0
        if needed + pinned > pool.free:
            # What is being copied comes back. If even that is not enough, the allocation fails as it would without tiers.
            if needed + pinned > pool.free + copying:
                return None
            counters.unclean_waits += 1
            return deadline()
        spare = self.state.first.num_pages - max(0, needed - pool.unnamed)
        reach = needed + max(0, min(self.ahead, spare)) - copying
        dirty = self._survey(max(reach, needed), needed, hit)
        reached = [item for item in dirty if item.depth < needed]
        if reached and not self._drops and spare >= 0:
            # What is being copied comes back to the head, clean: that much less of what stands there now is needed.
            self._clean([item for item in dirty if item.depth < reach], max(reach, 0), now)
            if needed + pinned > pool.free or self._survey(needed, hit=hit):
                if self.copying:
                    counters.unclean_waits += 1
                    return deadline()
            else:
                return None  # others that are clean will do
        else:
            self._clean([item for item in dirty if needed <= item.depth < reach], max(reach, 0), now)
        self._doomed = [(item.depth - pool.unnamed, item.size) for item in reached]
        return None

    def _notice(self) -> None:
        """See what the device has evicted since last time."""
        given_up = self.state.layout.pool.evicted
        taken = given_up - self._given_up
        if taken:
            self._given_up = given_up
            self._copied = [PendingPages() for _ in self._copied]
            counters = self.state.counters
            counters.dropped_blocks += sum(max(0, min(size, taken - before)) for before, size in self._doomed)
        self._doomed = []

    def _touch(self, count: int) -> None:
        """Have the host evict last what it has of the first ``count`` blocks of the line: else it would do so for the sake
        of the others.
        """
        pool, store = self.state.layout.pool, self.state.first
        depth = pool.unnamed
        for extent in pool.order:
            if depth >= count:
                break
            depth += len(extent.ids)
            if extent.node is not None:
                store.touch(extent.node.group, whole_chain(extent.node), extent.stop)

    def _survey(self, count: int, cut: int = 0, hit: Hit | None = None) -> list[_Dirty]:
        """Return the blocks that aren't clean among the first ``count`` of the free list, none reaching across the first
        ``cut``.

        Blocks of ``hit`` are about to be held, so they don't count.
        """
        pool, store = self.state.layout.pool, self.state.first
        dirty: list[_Dirty] = []
        depth = pool.unnamed
        if depth >= count:
            return dirty
        kept = _kept(hit) if hit is not None else {}
        seen: set[Node] = set()
        for extent in pool.order:
            node = extent.node
            start, stop = extent.start, extent.start + len(extent.ids)
            clean = node is None or node in seen  # one copy is enough
            if node is not None and node in kept:
                low, high = kept[node]
                if node.copies[0] is extent and high < stop:
                    start = max(start, high)
                elif node.copies[0] is extent:
                    stop = min(stop, max(start, low))
                else:
                    clean = True
            first = max(start, stop - (count - depth))
            if not clean and node is not None:
                seen.add(node)
                chain, group = whole_chain(node), node.group
                middle = max(first, stop - (cut - depth)) if depth < cut else first
                for low, high in ((first, middle), (middle, stop)):
                    for begin, end in store.missing(group, chain.keys, low, high) if low < high else ():
                        dirty.append(_Dirty(extent, PageRange(group, chain, begin, end), depth + stop - end))
            depth += stop - first
            if depth >= count:
                break
        return dirty

    def _clean(self, dirty: list[_Dirty], reach: int, now: int) -> None:
        """Copy to the host what of ``dirty`` has not been copied lately: all of it, or one by one as far as there is room.

        It lies among the first ``reach`` blocks of the line.
        """
        if not dirty or self._stuck == self.state.landings:
            return
        fresh: list[_Dirty] = []
        for extent, piece, depth in dirty:
            group, chain, start, stop = piece.group, piece.chain, piece.start, piece.stop
            done = self._copied[group].spans(chain.keys, stop)
            for low, high in without(start, stop, done) if done else ((start, stop),):
                fresh.append(_Dirty(extent, PageRange(group, chain, low, high), depth + stop - high))
        if not fresh:
            return
        self._touch(reach)
        if not self._send(fresh, now):
            for item in fresh if len(fresh) > 1 else ():
                if not self._send([item], now):
                    break
            self._stuck = self.state.landings

    def _send(self, dirty: list[_Dirty], now: int) -> bool:
        """Copy ``dirty`` as one cohort; returns whether the host had room."""
        state, pool = self.state, self.state.layout.pool
        batches = self.storer.batches([item.piece for item in dirty])
        far = state.first.reserve([piece for batch in batches for piece in batch])
        if far is None:
            state.counters.tiers[0].no_room += 1
            return False
        for item in dirty:
            self._copied[item.piece.group].add(item.piece)
        items = iter(dirty)
        extent, left = dirty[0].extent, 0
        near: list[list[BlockTable]] = []
        for batch in batches:
            tables: list[BlockTable] = []
            for piece in batch:
                if not left:
                    item = next(items)
                    extent, left = item.extent, item.size
                left -= piece.stop - piece.start
                # From front to back: what is split off is the earlier part, and the extent keeps the later.
                if extent.start < piece.start:
                    pool.split(extent, piece.start - extent.start)
                part = pool.split(extent, piece.stop - piece.start) if extent.stop > piece.stop else extent
                tables.append(pool.holds.pin([part]))
            near.append(tables)
        self.storer.send(0, batches, near, far, now, returns=True)
        self.cohorts += 1
        return True


def _kept(hit: Hit) -> dict[Node, tuple[int, int]]:
    """Return the positions that ``hit`` has of each node."""
    return {node: (group.low, group.blocks) for group in hit.groups for node in group.parts() if node.stop > group.low}
