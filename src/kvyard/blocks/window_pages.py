"""Pages of sliding-window layers beside a radix tree of full attention, as SGLang keeps them.

Every token has a slot in two pools: one of full attention, whose pages the tree's nodes hold, and one of the window layers.
Only the number of window pages matters here. A node of the tree has its window pages or has lost them; a prefix can be
reused where the nodes before its end have a whole window of them. A request gives back its own window pages as its window
moves on, and locks those of the tree that its window covers.
"""

from math import inf

from kvyard.blocks.extent import Extent, Node
from kvyard.blocks.host_windows import HostWindows
from kvyard.blocks.node_parts import NodeParts, part_of
from kvyard.integers import ceil_div


class WindowPages(NodeParts):
    """The window pages of one tree: how many are free, and which nodes have theirs, in order of use."""

    def __init__(self, pages: int, window: int, page_size: int) -> None:
        """``window``: tokens before the current one that a layer reads."""
        super().__init__(pages)
        self.window = window
        self.page_size = page_size
        self.pages = ceil_div(window, page_size)
        """Pages that a window fits in where it begins with one."""
        self.host: HostWindows | None = None
        """Window pages of host memory, if there is any."""

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
        newer = self.line.ends
        ancestor: Node | None = node
        while ancestor is not None and covered < span:
            part = part_of(ancestor.copies[0])
            if part.present:
                self.line.unlink(part)
                self.line.link(part, newer)
                newer = part
            covered += (ancestor.stop - ancestor.start) * self.page_size
            ancestor = ancestor.parent

    def split(self, front: Extent, extent: Extent) -> None:
        """``front`` was split off the node of ``extent``."""
        later = part_of(extent)
        part = part_of(front)
        part.locks, part.present, part.writing = later.locks, later.present, later.writing
        if part.present:
            self.line.link(part, later)

    def enter(self, extent: Extent) -> None:
        """Take over window pages of the request that inserts a node."""
        part = part_of(extent)
        self._enter(part, extent, len(extent.ids))
        if part.host is not None and self.host is not None:
            self.host.restored(part.host)

    def evict(self, extent: Extent) -> None:
        """Free the window pages of a node, if it has any; no request may read them."""
        part = part_of(extent)
        if part.present:
            self._evict(part, len(extent.ids))
            if part.host is not None and self.host is not None:
                self.host.lost(part.host)

    # -- requests ---------------------------------------------------------------------------------------------------

    def lock(self, node: Node) -> int:
        """Lock the window that ends with ``node``, which a request reads. Returns the position where the locked nodes begin."""
        covered = 0
        low = node.stop
        ancestor: Node | None = node
        while ancestor is not None and covered < self.window:
            self._lock(part_of(ancestor.copies[0]), ancestor.stop - ancestor.start)
            covered += (ancestor.stop - ancestor.start) * self.page_size
            low, ancestor = ancestor.start, ancestor.parent
        return low

    def unlock(self, node: Node, low: int) -> None:
        """Take back a lock of the nodes from position ``low`` to the end of ``node``."""
        ancestor: Node | None = node
        while ancestor is not None and ancestor.stop > low:
            self._unlock(part_of(ancestor.copies[0]), ancestor.stop - ancestor.start)
            ancestor = ancestor.parent

    def hold(self, nodes: list[Node]) -> list[Node]:
        """Lock the window at the end of ``nodes`` for a moment. Returns the locked ones, for ``end_hold``."""
        covered = 0
        held: list[Node] = []
        for node in reversed(nodes):
            if covered >= self.window:
                break
            self._lock(part_of(node.copies[0]), node.stop - node.start)
            covered += (node.stop - node.start) * self.page_size
            held.append(node)
        return held

    def end_hold(self, held: list[Node]) -> None:
        """Take back the locks of ``hold``."""
        for node in held:
            self._unlock(part_of(node.copies[0]), node.stop - node.start)

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
