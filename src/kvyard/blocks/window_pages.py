"""Pages of sliding-window layers beside a radix tree of full attention, as SGLang keeps them.

Every token has a slot in two pools: one of full attention, whose pages the tree's nodes hold, and one of the window layers.
Only the number of window pages matters here. A node of the tree has its window pages or has lost them; a prefix can be
reused where the nodes before its end have a whole window of them. A request gives back its own window pages as its window
moves on, and locks those of the tree that its window covers.
"""

from math import inf

from kvyard.blocks.eviction.radix import WindowPart, use_of
from kvyard.blocks.extent import Extent, Node
from kvyard.blocks.host_windows import HostWindows
from kvyard.integers import ceil_div


class WindowPages:
    """The window pages of one tree: how many are free, and which nodes have theirs, in order of use."""

    def __init__(self, pages: int, window: int, page_size: int) -> None:
        """``window``: tokens before the current one that a layer reads."""
        self.free = pages
        self.window = window
        self.page_size = page_size
        self.pages = ceil_div(window, page_size)
        """Pages that a window fits in where it begins with one."""
        self.size = pages
        self.evictable = 0
        """Pages of nodes whose window no request reads."""
        self.protected = 0
        self.host: HostWindows | None = None
        """Window pages of host memory, if there is any."""
        self._ends = WindowPart(Extent([], 0))
        """Joins the two ends of the list of nodes with window pages: ``older`` is the latest used, ``newer`` the earliest."""
        self._ends.older = self._ends.newer = self._ends

    # -- the tree ---------------------------------------------------------------------------------------------------

    def usable(self, nodes: list[Node]) -> int:
        """Return how many of ``nodes``, which lead down from the root, a request can reuse."""
        return self._covered(nodes, [part_of(node.copies[0]).present for node in nodes])

    def usable_below(self, nodes: list[Node]) -> int:
        """Return how many of ``nodes`` a request can reuse once it has loaded the windows that only the host has."""
        parts = [part_of(node.copies[0]) for node in nodes]
        return self._covered(nodes, [part.present or part.host is not None for part in parts])

    def _covered(self, nodes: list[Node], present: list[bool]) -> int:
        """Return how many of ``nodes`` end in a whole window of those that are ``present``."""
        covered = inf
        usable = 0
        for count, (node, there) in enumerate(zip(nodes, present, strict=True), 1):
            if not there:
                covered = 0
                continue
            covered += (node.stop - node.start) * self.page_size
            if covered >= self.window:
                usable = count
        return usable

    def on_host(self, nodes: list[Node]) -> list[Node]:
        """Return those of ``nodes``, in order, in the window at their end that only the host has window pages of."""
        covered = 0
        missing: list[Node] = []
        for node in reversed(nodes):
            part = part_of(node.copies[0])
            if covered >= self.window or (not part.present and part.host is None):
                break
            if not part.present:
                missing.append(node)
            covered += (node.stop - node.start) * self.page_size
        missing.reverse()
        return missing

    def unwritten(self, node: Node) -> list[Node]:
        """Return the nodes in the window that ends with ``node`` whose window pages the host hasn't, in order."""
        covered = 0
        missing: list[Node] = []
        above: Node | None = node
        while above is not None and covered < self.window:
            part = part_of(above.copies[0])
            if part.writing or (not part.present and part.host is None):
                break
            if part.present and part.host is None:
                missing.append(above)
            covered += (above.stop - above.start) * self.page_size
            above = above.parent
        missing.reverse()
        return missing

    def use(self, node: Node) -> None:
        """Make the window that ends with ``node`` the most recently used, after a match or an insert."""
        span = self.window + self.page_size
        covered = 0
        newer = self._ends
        ancestor: Node | None = node
        while ancestor is not None and covered < span:
            part = part_of(ancestor.copies[0])
            if part.present:
                self._unlink(part)
                self._link(part, newer)
                newer = part
            covered += (ancestor.stop - ancestor.start) * self.page_size
            ancestor = ancestor.parent

    def split(self, front: Extent, extent: Extent) -> None:
        """``front`` was split off the node of ``extent``."""
        later = part_of(extent)
        part = part_of(front)
        part.locks, part.present, part.writing = later.locks, later.present, later.writing
        if part.present:
            self._link(part, later)

    def enter(self, extent: Extent) -> None:
        """Take over window pages of the request that inserts a node."""
        part = part_of(extent)
        part.present = True
        part.extent = extent
        self._link(part, self._ends)
        if self.host is not None:
            self.host.restored(part)
        if part.locks:
            self.protected += len(extent.ids)
        else:
            self.evictable += len(extent.ids)

    def evict(self, extent: Extent) -> None:
        """Free the window pages of a node, if it has any; no request may read them."""
        part = part_of(extent)
        if part.present:
            assert not part.locks, f"{extent} is read by a window and evicted"
            part.present = False
            self._unlink(part)
            self.evictable -= len(extent.ids)
            self.free += len(extent.ids)
            if self.host is not None and part.host is not None:
                self.host.lost(part)

    def first(self) -> Extent | None:
        """Return the node whose window pages are evicted next."""
        part = self._ends.newer
        while part.locks:
            part = part.newer
        return part.extent if part is not self._ends else None

    # -- requests ---------------------------------------------------------------------------------------------------

    def lock(self, node: Node) -> int:
        """Lock the window that ends with ``node``, which a request reads. Returns the position where the locked nodes begin."""
        covered = 0
        low = node.stop
        ancestor: Node | None = node
        while ancestor is not None and covered < self.window:
            part = part_of(ancestor.copies[0])
            if part.present and not part.locks:
                self._protect(ancestor.stop - ancestor.start)
            part.locks += 1
            covered += (ancestor.stop - ancestor.start) * self.page_size
            low, ancestor = ancestor.start, ancestor.parent
        return low

    def unlock(self, node: Node, low: int) -> None:
        """Take back a lock of the nodes from position ``low`` to the end of ``node``."""
        ancestor: Node | None = node
        while ancestor is not None and ancestor.stop > low:
            part = part_of(ancestor.copies[0])
            part.locks -= 1
            if part.present and not part.locks:
                self._protect(ancestor.start - ancestor.stop)
            ancestor = ancestor.parent

    def hold(self, nodes: list[Node]) -> list[Node]:
        """Lock the window at the end of ``nodes`` for a moment. Returns the locked ones, for ``end_hold``."""
        covered = 0
        held: list[Node] = []
        for node in reversed(nodes):
            if covered >= self.window:
                break
            part = part_of(node.copies[0])
            if part.present and not part.locks:
                self._protect(node.stop - node.start)
            part.locks += 1
            covered += (node.stop - node.start) * self.page_size
            held.append(node)
        return held

    def end_hold(self, held: list[Node]) -> None:
        """Take back the locks of ``hold``."""
        for node in held:
            part = part_of(node.copies[0])
            part.locks -= 1
            if part.present and not part.locks:
                self._protect(node.start - node.stop)

    def lockable(self, nodes: list[Node]) -> int:
        """Return how many evictable pages a lock at the end of ``nodes`` would protect."""
        covered = pages = 0
        for node in reversed(nodes):
            if covered >= self.window:
                break
            part = part_of(node.copies[0])
            if part.present and not part.locks:
                pages += node.stop - node.start
            covered += (node.stop - node.start) * self.page_size
        return pages

    def _protect(self, pages: int) -> None:
        self.evictable -= pages
        self.protected += pages

    # -- the list ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _link(part: WindowPart, newer: WindowPart) -> None:
        """Put ``part`` next to ``newer``, as used before it."""
        older = newer.older
        part.newer, part.older = newer, older
        newer.older = older.newer = part

    @staticmethod
    def _unlink(part: WindowPart) -> None:
        part.newer.older, part.older.newer = part.older, part.newer


def part_of(extent: Extent) -> WindowPart:
    """Return the window part of a node's extent."""
    use = use_of(extent)
    part = use.window
    if part is None:
        part = use.window = WindowPart(extent)
    return part
