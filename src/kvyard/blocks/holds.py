"""Blocks that transfers hold: sources and destinations of copies between tiers and workers."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvyard.blocks.extent import Extent
from kvyard.blocks.ledger import NOBODY
from kvyard.blocks.table import BlockTable

if TYPE_CHECKING:
    from kvyard.blocks.pool import Pool


class Holds:
    """Blocks that transfers hold in one pool: a table per transfer, since others may split an extent while it is held."""

    __slots__ = ("_pool", "tables")

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool
        self.tables: set[BlockTable] = set()

    def pin(self, extents: Iterable[Extent]) -> BlockTable:
        """Pin ``extents`` for a transfer, until it ends."""
        held = BlockTable()
        for extent in extents:
            self._pool.pin(extent)
            held.append(extent)
        self.tables.add(held)
        return held

    def take(self, count: int, start: int, account: int = NOBODY) -> BlockTable:
        """Take ``count`` blocks as the destination of a transfer, at positions from ``start`` on. Raises as ``Pool.take``."""
        held = BlockTable()
        extent = Extent(self._pool.take(count, account), start)
        extent.account = account
        held.append(extent)
        self.tables.add(held)
        return held

    def end(self, held: BlockTable) -> None:
        """End a transfer: drop its references."""
        self.tables.remove(held)
        self._pool.release(held.settle())

    def end_all(self, tables: Sequence[BlockTable]) -> None:
        """End holds of blocks that ``BlockManager.detach`` kept: of all groups at once, so the last group's blocks are handed
        out before the first's."""
        self.tables.difference_update(tables)
        self._pool.release([extent for table in tables for extent in table.settle()])

    def end_copies(self, ends: Sequence[Extent]) -> None:
        """Free both ends of copies within the pool that have run, the first one to be handed out last."""
        pool = self._pool
        pool.pinned.subtract(ends)
        pool.pinned = +pool.pinned
        pool.release(ends[::-1])

    def cancel(self, held: BlockTable) -> None:
        """End a transfer that took ``held`` from the head of the eviction order: extents without a reference go back there."""
        pool = self._pool
        self.tables.remove(held)
        for extent in held.settle():
            if extent.refs == 1 and extent.cached:
                extent.refs = 0
                pool.free += len(extent.ids)
                pool.order.push_front(extent)
            else:
                pool.release((extent,))

    def end_move(self, held: BlockTable) -> None:
        """End a transfer that moved ``held`` elsewhere: free blocks without another reference."""
        self.tables.remove(held)
        for extent in held.settle():
            if extent.refs == 1:
                self._pool.discard(extent)
            else:
                extent.refs -= 1
