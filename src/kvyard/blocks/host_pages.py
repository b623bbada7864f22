"""Pages of host memory beside a radix tree, as SGLang's HiCache keeps them.

A node of the tree is on the device, on the host, or on both. The host has a tree of its own, cut at the same positions. A node
that both have is held on the host for as long as the device has it; after that the host evicts it as the device evicts its
leaves, by the same uses. With write-back, where a node is copied when the device evicts it, the host may give up its copy of
what both have before that. What is copied when is decided here; how long it takes is ``kvyard.tiers.hicache``'s business.
"""

from collections.abc import Callable
from typing import NamedTuple

from kvyard.blocks.eviction.radix import RadixOrder, use_of
from kvyard.blocks.extent import Extent, Node
from kvyard.blocks.host_windows import HostWindows
from kvyard.blocks.node_parts import part_of
from kvyard.blocks.pool import Pool
from kvyard.blocks.table import BlockTable
from kvyard.blocks.window_pages import WindowPages
from kvyard.hashing import Chain, Keys


class PageCopy(NamedTuple):
    """A copy between device and host that is wanted or in flight, and what it holds of both."""

    device: BlockTable
    """From the root to the last page."""
    host: BlockTable
    pages: int
    """Of full and window layers together."""
    again: BlockTable | None = None
    """Nodes that the host had, and whose window pages it gets."""
    window: tuple[Node, int] | None = None
    """End and first position of the window that it has locked on the device."""
    number: int = 0


class HostPages:
    """The nodes of one tree that host memory has."""

    def __init__(
        self,
        device: Pool,
        host: Pool,
        threshold: int | None,
        announce: Callable[[Node], None],
        flush: Callable[[], None],
    ) -> None:
        """``threshold``: inserts after which a node is copied to the host; ``None``: when the device evicts it (write-back).
        ``announce`` is called with every node that was copied, ``flush`` to have ``writes`` carried out at once.
        """
        self.device = device
        self.pool = host
        self.map = host.maps[0]
        self.order: RadixOrder = host.radix.order
        self.threshold = threshold
        self.writes_back = threshold is None
        self._announce = announce
        self._flush = flush
        self._duplicates: dict[Node, None] = {}
        """With write-back, nodes of the host that the device has or had, too, in the order in which they are given up."""
        self.writes: list[PageCopy] = []
        """Copies to the host that have not been submitted."""
        self.loads: list[PageCopy] = []
        """Copies to the device that have not been submitted."""
        self.windows: WindowPages | None = None
        """Window pages of the device, if the host has some too."""
        self._numbers = 0
        self.persist: Callable[[Node], None] | None = None
        """Called with every node that was copied, if there is storage behind the host."""
        self.locks: set[BlockTable] = set()
        """Tables that are held for storage."""
        device.radix.demoting = self._demote
        if threshold is None:
            device.radix.retiring = self._retire

    def open_windows(self, windows: WindowPages, pages: int) -> None:
        """Keep window pages, too, ``pages`` at most."""
        self.windows = windows
        windows.host = HostWindows(pages, self.pool.radix.evict_leaf)
        self.pool.radix.retiring = self._discard_windows

    def _discard_windows(self, node: Node) -> None:
        """Discard window pages of ``node``, which the host is about to evict."""
        assert self.windows is not None
        assert self.windows.host is not None
        self.windows.host.discard(part_of(node.copies[0]))

    def below(self, node: Node) -> Node | None:
        """Return the host's node with the pages of ``node``, if it has them."""
        copied = self.map.starts.get(node.key)
        return copied if copied is not None and copied.copies else None

    def walk(self, keys: Keys, limit: int, at: int) -> tuple[list[Node], int]:
        """Return the nodes that a chain continues with at position ``at``, where the device's end, and how far they agree with
        it.
        """
        return self.map.walk(keys, limit, through_holes=False, index=at)

    # -- to the host ------------------------------------------------------------------------------------------------

    def inserted(self, node: Node) -> None:
        """Copy ``node``, which was just inserted, to the host if it was inserted often enough; missing ancestors first."""
        threshold = self.threshold
        if threshold is None or self.below(node) is not None or use_of(node.copies[0]).hits < threshold:
            return
        missing = [node]
        above = node.parent
        while above is not None and self.below(above) is None:
            missing.append(above)
            above = above.parent
        for wanted in reversed(missing):
            windows = self.windows.unwritten(wanted) if self.windows is not None else []
            extent = self._room_for(wanted)
            if extent is None:
                return
            if windows and not self._window_room_for(windows):
                self.pool.release([extent])
                return
            above = self.below(wanted.parent) if wanted.parent is not None else None
            self.map.enter(wanted.chain, extent, above.copies[0] if above is not None else None)
            self._write(wanted, extent, self._hold_path(wanted), windows)

    def insert_ended(self, node: Node) -> None:
        """Copy window pages that the host lacks, after an insert that ended with ``node`` and added nothing to it."""
        windows = self.windows
        if windows is None or self.threshold is None or self.below(node) is None or part_of(node.copies[0]).writing:
            return
        missing = windows.unwritten(node)
        if missing and self._window_room_for(missing):
            self._write(node, None, self._hold_path(node), missing)

    def _hold_path(self, node: Node) -> BlockTable:
        return self.device.holds.pin([step.copies[0] for step in path_to(node)])

    def _window_room_for(self, nodes: list[Node]) -> bool:
        """Make room on the host for the window pages of ``nodes``. Returns true if there is."""
        assert self.windows is not None
        assert self.windows.host is not None
        return self.windows.host.make_room(sum([node.stop - node.start for node in nodes]))

    def _room_for(self, node: Node) -> Extent | None:
        """Return pages of the host for a copy of ``node``; ``None`` if there is no room."""
        pages = node.stop - node.start
        pool = self.pool
        if self._duplicates and pool.unnamed < pages:
            self._reclaim(pages)
        pool.radix.make_room(pages)
        if pool.unnamed < pages:
            return None
        extent = Extent(pool.take(pages), node.start)
        extent.history = use_of(node.copies[0])
        return extent

    def _write(self, node: Node, extent: Extent | None, held: BlockTable, windows: list[Node]) -> None:
        """Have ``node``, which ``extent`` is a copy of if that is new, and the window pages of ``windows`` copied to the host
        while ``held`` is.
        """
        pages = 0
        if extent is not None:
            assert extent.node is not None
            self.map.detach(extent.node, node.chain)
            pages = node.stop - node.start
        host = self.pool.holds.pin([extent] if extent is not None else [])
        if self.windows is None:
            self.writes.append(PageCopy(held, host, pages))
            return
        below = self.windows.host
        assert below is not None
        self._numbers += 1
        again: list[Extent] = []
        for covered in windows:
            host_node = self.below(covered)
            assert host_node is not None
            below.enter(part_of(covered.copies[0]), host_node.copies[0])
            pages += covered.stop - covered.start
            if covered is not node:
                again.append(host_node.copies[0])
        if extent is None:
            host_node = self.below(node)
            assert host_node is not None
            again.append(host_node.copies[0])
        for covered in (*windows, node):
            part_of(covered.copies[0]).writing = self._numbers
        lock = (node, self.windows.lock(node))
        self.writes.append(PageCopy(held, host, pages, self.pool.holds.pin(again), lock, self._numbers))

    def written(self, copy: PageCopy) -> None:
        """Finish a copy to the host."""
        for extent in (*(copy.again.settle() if copy.again is not None else ()), *copy.host.settle()):
            assert extent.node is not None
            if self.windows is not None:
                part = part_of(extent)
                part.writing = part.writing if part.writing != copy.number else 0
            self._announce(extent.node)
        written = [extent for table in (copy.again, copy.host) if table is not None for extent in table.settle()]
        self._release_copy(copy)
        if self.persist is not None:
            for extent in written:
                assert extent.node is not None
                self.persist(extent.node)

    def _retire(self, node: Node) -> None:
        """Copy ``node``, which the device is about to evict, to the host, unless the host has it or has no room."""
        if self.below(node) is not None:
            return
        extent = self._room_for(node)
        if extent is None:
            return
        self.map.enter_below(path_to(node), extent)
        self._write(node, extent, self.device.holds.pin([]), [])
        self._flush()
        assert extent.node is not None
        self.note(extent.node)

    def note(self, node: Node) -> None:
        """With write-back, mark ``node`` of the host as evictable: the device has it too, and no copy of it is in flight."""
        if not self.writes_back:
            return
        extent = node.copies[0]
        if extent.refs - sum([extent in held.settle() for held in self.locks]) == 1:
            self._duplicates.setdefault(node)

    def _reclaim(self, pages: int) -> None:
        """Give up copies of what the device has, too, until ``pages`` are free; leaves that the device may evict last."""
        pool, device = self.pool, self.device.maps[0].starts
        given_up: list[Node] = []
        for sparing in (True, False):
            for node in self._duplicates:
                if pool.unnamed >= pages:
                    break
                above = device.get(node.key)
                if not node.copies or above is None:
                    given_up.append(node)
                    continue
                leaf = not above.kids and not above.copies[0].refs
                if (sparing and leaf) or node.copies[0].refs > 1:
                    continue
                pool.discard(node.copies[0])
                given_up.append(node)
        for node in given_up:
            self._duplicates.pop(node, None)

    def _demote(self, node: Node) -> None:
        """Note that the device has evicted ``node``."""
        below = self.below(node)
        if below is not None:
            self.pool.release(below.copies)

    # -- from storage -----------------------------------------------------------------------------------------------

    def add(self, chain: Chain, extent: Extent, above: Node | None) -> None:
        """Register ``extent``, which came from storage, behind ``above``, a node of the device or the host."""
        path = [] if above is None else path_to(above)
        self.map.enter_below(
            [*path, Node(0, chain, chain.keys[extent.start], extent.start, extent.stop, above)], extent
        )
        assert extent.node is not None
        self.map.detach(extent.node, chain)
        self._announce(extent.node)

    def evict(self, pages: int) -> None:
        """Evict ``pages`` pages, whole leaves, or all there are."""
        pages += self.pool.unnamed
        if self._duplicates:
            self._reclaim(pages)
        self.pool.radix.make_full_room(pages)

    def lock(self, node: Node) -> BlockTable:
        """Hold ``node`` of the host while storage needs it."""
        held = self.pool.holds.pin([node.copies[0]])
        self.locks.add(held)
        return held

    def unlock(self, held: BlockTable) -> None:
        """End a ``lock``."""
        self.locks.remove(held)
        self.pool.holds.end(held)

    # -- to the device ----------------------------------------------------------------------------------------------

    def loaded(self, copy: PageCopy) -> None:
        """Finish a copy to the device."""
        extents = copy.host.settle() if self.writes_back else []
        self._release_copy(copy)
        for extent in reversed(extents):
            if extent.node is not None:
                self.note(extent.node)

    def _release_copy(self, copy: PageCopy) -> None:
        if copy.window is not None:
            assert self.windows is not None
            self.windows.unlock(*copy.window)
        self.device.holds.end(copy.device)
        self.pool.holds.end(copy.host)
        if copy.again is not None:
            self.pool.holds.end(copy.again)


def path_to(node: Node) -> list[Node]:
    """Return the nodes from the root to ``node``."""
    path: list[Node] = []
    ancestor: Node | None = node
    while ancestor is not None:
        path.append(ancestor)
        ancestor = ancestor.parent
    path.reverse()
    return path
