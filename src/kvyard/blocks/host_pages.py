"""Pages of host memory beside a radix tree, as SGLang's HiCache keeps them.

A node of the tree is on the device, on the host, or on both. The host has a tree of its own, cut at the same positions. A node
that both have is held on the host for as long as the device has it; after that the host evicts it as the device evicts its
leaves, by the same uses. What is copied when is decided here; how long it takes is ``kvyard.tiers.hicache``'s business.
"""

from collections.abc import Callable
from typing import NamedTuple

from kvyard.blocks.eviction.radix import RadixOrder, use_of
from kvyard.blocks.extent import Extent, Node
from kvyard.blocks.pool import Pool
from kvyard.blocks.table import Table
from kvyard.hashing import Keys

HOST_TICKETS = 1 << 60
"""First of the host's tickets: both eviction policies know the same uses and must not confuse each other's tickets."""


class PageCopy(NamedTuple):
    """A copy between device and host that is wanted or in flight, and what it holds of both."""

    device: Table
    """From the root to the last page."""
    host: Table
    pages: int


class HostPages:
    """The nodes of one tree that host memory has."""

    def __init__(self, device: Pool, host: Pool, threshold: int, announce: Callable[[Node], None]) -> None:
        """``threshold``: inserts after which a node is copied to the host. ``announce`` is called with every node that was."""
        assert host.radix is not None
        self.device = device
        self.pool = host
        self.map = host.maps[0]
        self.order: RadixOrder = host.radix
        self.order.begin_tickets(HOST_TICKETS)
        self.threshold = threshold
        self._announce = announce
        self.writes: list[PageCopy] = []
        """Copies to the host that have not been submitted."""
        self.loads: list[PageCopy] = []
        """Copies to the device that have not been submitted."""
        device.demoting = self._demote

    def below(self, node: Node) -> Node | None:
        """The host's node with the pages of ``node``, if it has them."""
        return self.map.starts.get(node.key)

    def walk(self, keys: Keys, limit: int, at: int) -> tuple[list[Node], int]:
        """The nodes that a chain continues with at position ``at``, where the device's end, and how far they agree with it."""
        return self.map.walk(keys, limit, through_holes=False, at=at)

    # -- to the host ------------------------------------------------------------------------------------------------

    def inserted(self, node: Node) -> None:
        """An insert came along ``node``: copy it to the host if it came often enough, ancestors that are not there first."""
        if self.below(node) is not None or use_of(node.copies[0]).hits < self.threshold:
            return
        missing = [node]
        above = node.parent
        while above is not None and self.below(above) is None:
            missing.append(above)
            above = above.parent
        for wanted in reversed(missing):
            if not self._write(wanted):
                return

    def _write(self, node: Node) -> bool:
        """Have ``node`` copied to the host; false if there is no room."""
        pages = node.stop - node.start
        pool = self.pool
        pool.make_room(pages)
        if pool.unnamed < pages:
            return False
        above = self.below(node.parent) if node.parent is not None else None
        extent = Extent(pool.take(pages), node.start)
        extent.history = use_of(node.copies[0])
        self.map.enter(node.chain, extent, above.copies[0] if above is not None else None)
        assert extent.node is not None
        self.map.detach(extent.node, node.chain)
        self.writes.append(PageCopy(self.device.hold(path_to(node)), pool.hold([extent]), pages))
        return True

    def written(self, copy: PageCopy) -> None:
        """A copy has come to the host."""
        for extent in copy.host.settle():
            assert extent.node is not None
            self._announce(extent.node)
        self._let_go(copy)

    def _demote(self, node: Node) -> None:
        """The device has evicted ``node``."""
        below = self.below(node)
        if below is not None:
            self.pool.release(below.copies)

    # -- to the device ----------------------------------------------------------------------------------------------

    def loaded(self, copy: PageCopy) -> None:
        """A copy has come to the device."""
        self._let_go(copy)

    def _let_go(self, copy: PageCopy) -> None:
        self.device.let_go(copy.device)
        self.pool.let_go(copy.host)


def path_to(node: Node) -> list[Extent]:
    """The tree's copies from the root to ``node``."""
    path: list[Extent] = []
    at: Node | None = node
    while at is not None:
        path.append(at.copies[0])
        at = at.parent
    path.reverse()
    return path
