"""Window pages of nodes that host memory has, as SGLang's HiCache keeps them beside the host's full pages.

A node's window pages go to the host with its full pages, or later, when an insert ends with it. The host evicts them by
themselves: those first that the device lost first.
"""

from collections.abc import Callable

from kvyard.blocks.eviction.radix import WindowPart
from kvyard.blocks.extent import Extent


class HostWindows:
    """The host's window pages of one tree: how many are free, and which nodes only the host has them of."""

    def __init__(self, pages: int, evict_leaf: Callable[[Extent], None]) -> None:
        """``evict_leaf`` evicts full pages of the host, and calls ``discard`` for the window pages beside them."""
        self.free = pages
        self.size = pages
        self._evict_leaf = evict_leaf
        self._ends = WindowPart(Extent([], 0))
        """Joins the two ends of the list of nodes that only the host has windows of: ``older_below`` is the latest."""
        self._ends.older_below = self._ends.newer_below = self._ends

    def enter(self, part: WindowPart, extent: Extent) -> None:
        """Note that the window pages of ``extent`` are copied to the host, which must have room."""
        self.free -= len(extent.ids)
        part.host = extent

    def lost(self, part: WindowPart) -> None:
        """Note that the device evicted window pages that the host has."""
        if part.newer_below is None:
            self._link(part, self._ends)

    def restored(self, part: WindowPart) -> None:
        """Note that the device has the window pages again."""
        if part.newer_below is not None:
            self._unlink(part)

    def renew(self, part: WindowPart) -> None:
        """Make the pages the most recently used, after a load that held them failed."""
        if part.newer_below is not None:
            self._unlink(part)
            self._link(part, self._ends)

    def discard(self, part: WindowPart) -> int:
        """Free the host's window pages of a node, if it has any. Returns how many."""
        extent = part.host
        if extent is None:
            return 0
        self.restored(part)
        part.host = None
        self.free += len(extent.ids)
        return len(extent.ids)

    def split(self, front: WindowPart, later: WindowPart, extent: Extent) -> None:
        """``front``, whose full pages on the host are ``extent``, was split off the node of ``later``."""
        if later.host is None:
            return
        front.host = extent
        if later.newer_below is not None:
            self._link(front, later)

    def make_room(self, pages: int) -> bool:
        """Evict ``pages`` window pages, whole nodes where they are leaves, if fewer are free. Returns true if there is room."""
        if self.free >= pages:
            return True
        evicted = 0
        part = self._ends.newer_below
        while evicted < pages and part is not None and part is not self._ends:
            following = part.newer_below
            extent = part.host
            assert extent is not None
            assert extent.node is not None
            evicted += len(extent.ids)
            if extent.refs or extent.node.kids:
                self.discard(part)
            else:
                self._evict_leaf(extent)
            part = following
        return self.free >= pages

    # -- the list ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _link(part: WindowPart, newer: WindowPart) -> None:
        """Put ``part`` next to ``newer``, as lost before it."""
        older = newer.older_below
        assert older is not None
        part.newer_below, part.older_below = newer, older
        newer.older_below = older.newer_below = part

    @staticmethod
    def _unlink(part: WindowPart) -> None:
        newer, older = part.newer_below, part.older_below
        assert newer is not None
        assert older is not None
        newer.older_below, older.newer_below = older, newer
        part.newer_below = part.older_below = None
