"""Parts of a radix tree's nodes that are locked and evicted by themselves: window pages, states, window pages on the host."""

from kvyard.blocks.eviction.radix import NodePart, WindowPart, use_of
from kvyard.blocks.extent import Extent


class PartList:
    """Parts in order of use."""

    def __init__(self) -> None:
        self.ends = NodePart(Extent([], 0))
        """Joins the two ends of the list: ``older`` is the latest used, ``newer`` the earliest."""

    def link(self, part: NodePart, newer: NodePart | None = None) -> None:
        """Put ``part`` next to ``newer``, as used before it, or at the end, as the latest used."""
        newer = newer or self.ends
        older = newer.older
        part.newer, part.older = newer, older
        newer.older = older.newer = part

    @staticmethod
    def unlink(part: NodePart) -> None:
        """Take ``part`` out of the list."""
        part.newer.older, part.older.newer = part.older, part.newer

    def renew(self, part: NodePart) -> None:
        """Make ``part`` the latest used."""
        self.unlink(part)
        self.link(part)

    def first(self) -> Extent | None:
        """Return the node whose part is evicted next."""
        part = self.ends.newer
        while part.locks:
            part = part.newer
        return part.extent if part is not self.ends else None


class NodeParts:
    """Parts of one kind on the device: how many units are free, and which nodes have theirs."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = size
        self.evictable = 0
        """Units of nodes that no request has locked."""
        self.protected = 0
        self.line = PartList()
        """Nodes that have theirs."""

    def first(self) -> Extent | None:
        """Return the node whose part is evicted next."""
        return self.line.first()

    def _enter(self, part: NodePart, extent: Extent, units: int) -> None:
        """Give a node its part, which a request had."""
        part.present = True
        part.extent = extent
        self.line.link(part)
        if part.locks:
            self.protected += units
        else:
            self.evictable += units

    def _evict(self, part: NodePart, units: int) -> None:
        """Free a part, which must be there; no request may have locked it."""
        assert not part.locks, f"a part of {part.extent} is locked and evicted"
        part.present = False
        self.line.unlink(part)
        self.evictable -= units
        self.free += units

    def _lock(self, part: NodePart, units: int) -> None:
        """Add a lock of a node's part, whether it is there or not."""
        if part.present and not part.locks:
            self.evictable -= units
            self.protected += units
        part.locks += 1

    def _unlock(self, part: NodePart, units: int) -> None:
        """Release a lock."""
        part.locks -= 1
        if part.present and not part.locks:
            self.evictable += units
            self.protected -= units


def part_of(extent: Extent) -> WindowPart:
    """Return the window part of a node's extent."""
    use = use_of(extent)
    part = use.window
    if part is None:
        part = use.window = WindowPart(extent)
    return part
