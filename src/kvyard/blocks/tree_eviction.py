"""Eviction from a radix tree: whole leaves, with the window pages and states that their nodes have."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvyard.blocks.eviction.radix import RadixOrder
from kvyard.blocks.extent import Extent, Node
from kvyard.blocks.state_slots import StateSlots
from kvyard.blocks.window_pages import WindowPages

if TYPE_CHECKING:
    from kvyard.blocks.pool import Pool


class TreeEviction:
    """Makes room in a pool whose cached blocks are a radix tree."""

    __slots__ = ("demoting", "order", "pool", "retiring")

    def __init__(self, pool: "Pool", order: RadixOrder) -> None:
        self.pool = pool
        self.order = order
        self.demoting: Callable[[Node], None] | None = None
        """Called with every node that was evicted, if host memory may hold it."""
        self.retiring: Callable[[Node], None] | None = None
        """Called with every node that is about to be evicted, if host memory gets it then."""

    def make_room(self, count: int) -> None:
        """Evict leaves until ``count`` free blocks cache nothing, or no leaf is left; then window pages until as many of those
        are free.
        """
        self.make_full_room(count)
        if self.pool.windows is not None:
            self.make_window_room(count)

    def make_full_room(self, count: int) -> None:
        """Evict leaves until ``count`` free blocks cache nothing, or no leaf is left."""
        pool = self.pool
        while pool.unnamed < count:
            extent = self.order.first()
            if extent is None:
                break
            self.evict_leaf(extent)

    def make_window_room(self, count: int) -> None:
        """Evict window pages until ``count`` are free, whole nodes where they are leaves, or none is left to evict."""
        assert self.pool.windows is not None
        self._make_room(self.pool.windows, count)

    def make_state_room(self, count: int) -> None:
        """Evict states until ``count`` slots are free, whole nodes where they are leaves, or none is left to evict."""
        assert self.pool.states is not None
        self._make_room(self.pool.states, count)

    def _make_room(self, parts: WindowPages | StateSlots, count: int) -> None:
        while parts.free < count:
            extent = parts.first()
            if extent is None:
                return
            assert extent.node is not None
            if not (extent.refs or extent.node.kids):
                self.evict_leaf(extent)
                continue
            parts.evict(extent)
            if parts is self.pool.windows and self.pool.states is not None:
                self.pool.states.evict(extent)  # without a window there is nothing to go on from

    def evict_leaf(self, extent: Extent) -> None:
        """Evict a leaf that nobody holds."""
        pool, node = self.pool, extent.node
        assert node is not None
        if self.retiring is not None:
            self.retiring(node)
        parent = node.parent
        while parent is not None and not parent.copies:
            parent = parent.parent  # a hole is removed with the nodes behind it
        if pool.windows is not None:
            pool.windows.evict(extent)
        if pool.states is not None:
            pool.states.evict(extent)
        self.order.remove(extent)
        pool.unname(extent)
        extent.forget_neighbours()
        if self.demoting is not None:
            extent.history = None
            self.demoting(node)
        pool.vacate(extent)
        if parent is not None and not parent.kids:
            self.order.expose(parent.copies[0])
