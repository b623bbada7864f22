"""Offloading on eviction, ahead of time: blocks near the head of the device's free line are copied before they are needed.

A block is *clean* if giving it up loses nothing: it has no name, or the host has it or is getting it. While a block is copied
it is out of the line; then it goes back to the head, where it can still be hit until somebody takes it. Who needs a block
that isn't clean yet waits for its copy, or drops the content, as configured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvyard.blocks.cache_map import Node
from kvyard.blocks.extent import Extent
from kvyard.blocks.table import Table
from kvyard.tiers.depot import Kind
from kvyard.tiers.outward import Outward
from kvyard.tiers.path import whole_chain
from kvyard.tiers.piece import Piece, total_pages
from kvyard.tiers.site import Site


class _Dirty(NamedTuple):
    """Blocks of a free extent that the host doesn't have."""

    extent: Extent
    piece: Piece
    depth: int
    """How many blocks of the line go before the last of them does."""


class Cleaner:
    """Keeps the head of one worker's free line clean."""

    def __init__(self, site: Site, out: Outward) -> None:
        self.site = site
        self.out = out
        self.ahead = site.config.offload_ahead or 64
        self._drops = site.config.on_unclean == "drop"

    @property
    def copying(self) -> int:
        """How many blocks are out of the line for being copied."""
        site = self.site
        total = 0
        for copy in (*site.host.under_way.values(), *site.inbox):
            if copy.returns and copy.inbox is site.inbox:
                total += sum(total_pages(part.pieces) for part in (copy, *copy.rest))
        return total

    def work(self, now: int) -> None:
        """Copy from the head of the line until enough blocks are clean, or will be."""
        wanted = self.ahead - self.copying
        if wanted > 0:
            self._clean(self._survey(wanted), now)

    def make_clean(self, needed: int, now: int, deadline: Callable[[], int | None]) -> int | None:
        """See ``Offload.make_clean``."""
        counters, pool, copying = self.site.counters, self.site.layout.pool, self.copying
        if needed > pool.free:
            # What is being copied comes back. If even that is not enough, the allocation fails as it would without tiers.
            if needed > pool.free + copying:
                return None
            counters.unclean_waits += 1
            return deadline()
        spare = self.site.host.store.num_pages - max(0, needed - pool.unnamed)
        waits = not self._drops and spare >= 0
        dirty = self._survey(needed + max(0, min(self.ahead - copying, spare)), needed)
        reached = [item for item in dirty if item.depth < needed]
        if reached and waits:
            self._touch(needed)
            self._clean(dirty, now)
            if self.copying:
                counters.unclean_waits += 1
                return deadline()
        else:
            self._clean([item for item in dirty if item.depth >= needed], now)
        counters.dropped_blocks += sum(item.piece.stop - item.piece.start for item in reached)
        return None

    def _touch(self, count: int) -> None:
        """Have the host give up last what it has of the first ``count`` blocks of the line.

        Else it might do so for the sake of the others, and there would be no end to copying.
        """
        pool, store = self.site.layout.pool, self.site.host.store
        depth = pool.unnamed
        for extent in pool.order:
            if depth >= count:
                break
            depth += len(extent.ids)
            if extent.node is not None:
                store.touch(extent.node.map.group, whole_chain(extent.node).keys, extent.stop)

    def _survey(self, count: int, cut: int = 0) -> list[_Dirty]:
        """What is not clean among the first ``count`` blocks of the line, nothing reaching across the first ``cut``."""
        pool, store = self.site.layout.pool, self.site.host.store
        found: list[_Dirty] = []
        seen: set[Node] = set()
        depth = pool.unnamed
        if depth >= count:
            return found
        for extent in pool.order:
            node = extent.node
            stop = extent.start + len(extent.ids)
            low = max(extent.start, stop - (count - depth))
            if node is not None and node not in seen:
                seen.add(node)  # one copy of several is enough
                chain, group = whole_chain(node), node.map.group
                middle = max(low, stop - (cut - depth)) if depth < cut else low
                for first, last in ((low, middle), (middle, stop)):
                    for start, end in store.missing(group, chain.keys, first, last) if first < last else ():
                        found.append(_Dirty(extent, Piece(group, chain, start, end), depth + stop - end))
            depth += stop - low
            if depth >= count:
                break
        return found

    def _clean(self, dirty: list[_Dirty], now: int) -> None:
        """Copy ``dirty`` to the host: all of it, or one by one as far as there is room."""
        if dirty and not self._send(dirty, now):
            for item in dirty if len(dirty) > 1 else ():
                if not self._send([item], now):
                    break

    def _send(self, dirty: list[_Dirty], now: int) -> bool:
        """Copy ``dirty`` as one cohort; returns whether the host had room."""
        site, pool = self.site, self.site.layout.pool
        batches = self.out.batches([item.piece for item in dirty])
        far = site.host.store.reserve([piece for batch in batches for piece in batch])
        if far is None:
            site.counters.no_host_room += 1
            return False
        items = iter(dirty)
        extent, left = dirty[0].extent, 0
        near: list[list[Table]] = []
        for batch in batches:
            tables: list[Table] = []
            for piece in batch:
                if not left:
                    item = next(items)
                    extent, left = item.extent, item.piece.stop - item.piece.start
                left -= piece.stop - piece.start
                # From front to back: what is split off is the earlier part, and the extent keeps the later.
                if extent.start < piece.start:
                    pool.split(extent, piece.start - extent.start)
                part = pool.split(extent, piece.stop - piece.start) if extent.stop > piece.stop else extent
                tables.append(pool.hold([part]))
            near.append(tables)
        self.out.send(Kind.STORE, batches, near, far, now, returns=True)
        return True
