"""Window pages of nodes that host memory has, as SGLang's HiCache keeps them beside the host's full pages.

A node's window pages go to the host with its full pages, or later, when an insert ends with it. The host evicts them by
themselves: those first that the device lost first.
"""

from collections.abc import Callable

from kvyard.blocks.eviction.radix import NodePart, WindowPart
from kvyard.blocks.extent import Extent
from kvyard.blocks.node_parts import PartList, part_of


class HostWindows:
    """The host's window pages of one tree: how many are free, and which nodes only the host has them of."""

    def __init__(self, pages: int, evict_leaf: Callable[[Extent], None]) -> None:
        """``evict_leaf`` evicts full pages of the host, and calls ``discard`` for the window pages beside them."""
        self.free = pages
        self.size = pages
        self._evict_leaf = evict_leaf
        self.line = PartList()
        """Nodes that only the host has window pages of, in the order in which the device lost them."""

    def enter(self, part: WindowPart, extent: Extent) -> None:
        """Note that the window pages of ``extent`` are copied to the host, which must have room."""
        self.free -= len(extent.ids)
        part.host = NodePart(extent)

    def lost(self, part: NodePart) -> None:
        """Note that the device evicted window pages that the host has."""
        if not part.present:
            part.present = True
            self.line.link(part)

    def restored(self, part: NodePart) -> None:
        """Note that the device has the window pages again."""
        if part.present:
            part.present = False
            self.line.unlink(part)

    def renew(self, part: WindowPart) -> None:
        """Make the pages the most recently used, after a load that held them failed."""
        if part.host is not None and part.host.present:
            self.line.renew(part.host)

    def discard(self, part: WindowPart) -> None:
        """Free the host's window pages of a node, if it has any."""
        if part.host is not None:
            self.restored(part.host)
            self.free += len(part.host.extent.ids)
            part.host = None

    def split(self, front: WindowPart, later: WindowPart, extent: Extent) -> None:
        """``front``, whose full pages on the host are ``extent``, was split off the node of ``later``."""
        if later.host is None:
            return
        front.host = NodePart(extent)
        if later.host.present:
            front.host.present = True
            self.line.link(front.host, later.host)

    def make_room(self, pages: int) -> bool:
        """Evict ``pages`` window pages, whole nodes where they are leaves, if fewer are free. Returns true if there is room."""
        if self.free >= pages:
            return True
        evicted = 0
        while evicted < pages and (extent := self.line.first()) is not None:
            assert extent.node is not None
            evicted += len(extent.ids)
            if extent.refs or extent.node.kids:
                self.discard(part_of(extent))
            else:
                self._evict_leaf(extent)
        return self.free >= pages
