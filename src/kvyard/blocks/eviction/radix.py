"""The order of SGLang's radix tree: whole leaves, by when, how often or how early a node of the tree was used.

A node is one extent here, since a tree of this kind holds one copy of everything. Only nodes that no request holds and that
no cached node continues are candidates; the parent of an evicted leaf may be the next. Matching and inserting use nodes
(``kvyard.blocks.radix`` reports that), releasing them does not.
"""

from collections.abc import Callable, Iterator, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

from kvyard.blocks.extent import Extent, Node, UseHistory
from kvyard.blocks.spec import ConfigError

STEP: Final = 1 << 20
"""Ticks between two uses: ancestors of a used node are a tick older than their children."""
PROTECTED_HITS: Final = 2
"""Inserts after which ``slru`` keeps a node longer."""
MOST_TICKS: Final = 1 << 64
"""More ticks than a run has."""
TICKET_BITS: Final = 48


class NodePart:
    """Something that a node has beside its pages (``kvyard.blocks.node_parts``), such as the state of recurrent layers."""

    __slots__ = ("extent", "locks", "newer", "older", "present")

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        self.present = False
        """True if the node has it, and it is in a list."""
        self.locks = 0
        """Requests that read it when they began or were last inserted."""
        self.newer = self.older = self


class WindowPart(NodePart):
    """Pages of sliding-window layers of a node (``kvyard.blocks.window_pages``)."""

    __slots__ = ("host", "writing")

    def __init__(self, extent: Extent) -> None:
        super().__init__(extent)
        self.host: NodePart | None = None
        """Window pages on the host, if it has them, of the node's full pages there (``kvyard.blocks.host_windows``)."""
        self.writing = 0
        """The copy to the host that covers the node and is in flight, by number; 0 for none."""


class NodeUse(UseHistory):
    """Times and number of uses of a node. The parts of a split node share this, except for the time of access."""

    __slots__ = ("accessed", "created", "hits", "priority", "state", "window")

    def __init__(self, created: int = 0, hits: int = 0, priority: int = 0) -> None:
        # Of what learning orders keep, it has the ticket alone: nodes come and go with every request.
        self.ticket = 0
        self.accessed = created
        self.created = created
        self.hits = hits
        """Inserts that came along."""
        self.priority = priority
        """The highest priority of the requests that inserted it."""
        self.window: WindowPart | None = None
        self.state: NodePart | None = None

    def copy(self) -> "NodeUse":
        return NodeUse(self.created, self.hits, self.priority)


RANKS: Mapping[str, Callable[[NodeUse], int]] = {
    "lru": lambda use: use.accessed,
    "lfu": lambda use: use.hits * MOST_TICKS + use.accessed,
    "fifo": lambda use: use.created,
    "mru": lambda use: -use.accessed,
    "filo": lambda use: -use.created,
    "priority": lambda use: use.priority * MOST_TICKS + use.accessed,
    "slru": lambda use: int(use.hits >= PROTECTED_HITS) * MOST_TICKS + use.accessed,
}
"""SGLang's ``radix_eviction_policy``: the node with the least rank is evicted first."""


class RadixOrder:
    """Leaves of the tree that no request holds, by rank: a heap of numbers whose outdated ones stay until they come up."""

    reads_priorities = False
    counts_hits = True
    """True if inserts count as hits: with HiCache's write-back SGLang counts none."""

    def __init__(self, policy: str) -> None:
        """Raises ``ConfigError`` for a policy that SGLang doesn't have."""
        if policy not in RANKS:
            raise ConfigError(f"unknown radix_eviction_policy {policy!r}; choose one of {', '.join(RANKS)}")
        self._rank = RANKS[policy]
        self._by_access = policy == "lru"
        """True if no two nodes have the same rank, which is the time of their last use."""
        self._clock = 0
        self._heap: list[int] = []
        self._candidates: dict[int, Extent] = {}
        """Leaves by their number in the heap."""
        self._tickets = 0
        self._released: dict[Extent, None] = {}
        """Every extent without a reference, leaf or not."""

    # -- uses, reported by the tree -------------------------------------------------------------------------------

    def create(self, extent: Extent, priority: int) -> None:
        """Create the node of ``extent``, without a hit so far."""
        self._clock += STEP
        extent.history = NodeUse(self._clock, 0, priority)

    def use(self, extent: Extent) -> None:
        """Note that an insert reached ``extent``."""
        self._clock += STEP
        use_of(extent).accessed = self._clock

    def touch(self, extent: Extent, lower: "RadixOrder | None" = None) -> None:
        """Note a use of ``extent`` by itself. ``lower``: its order, if it is another."""
        self.use(extent)
        if use_of(extent).ticket:
            (lower or self)._enter(extent)

    def insert_along(self, extent: Extent, priority: int, counts: bool, used: bool = True) -> None:
        """Note an insert along all of ``extent``: a hit if it ``counts``. Unless ``used``, the extent was
        split off just now.
        """
        use = extent.history
        if not isinstance(use, NodeUse):
            use = use_of(extent)
        if used:
            self._clock += STEP
            use.accessed = self._clock
        use.priority = max(use.priority, priority)
        if counts and self.counts_hits:
            use.hits += 1
        if use.ticket:
            self._enter(extent)

    def insert_held(self, nodes: list[Node], priority: int, counted: int) -> None:
        """Note an insert along ``nodes``, which requests hold: a hit for those that end after position ``counted``."""
        clock, counts = self._clock, self.counts_hits
        for node in nodes:
            use = node.copies[0].history
            if not isinstance(use, NodeUse):
                use = use_of(node.copies[0])
            clock += STEP
            use.accessed = clock
            if priority:
                use.priority = max(use.priority, priority)
            if counts and node.stop > counted:
                use.hits += 1
        self._clock = clock

    def use_path(self, nodes: list[Node], beyond: list[Node] | None = None, lower: "RadixOrder | None" = None) -> None:
        """Note a match that ends with the last of ``nodes``, which lead there from the root; or of ``beyond``, which continue
        them and have ``lower`` as their order.
        """
        self._clock += STEP
        accessed = self._clock
        if beyond is not None and lower is not None:
            for node in reversed(beyond):
                below = use_of(node.copies[0])
                below.accessed = accessed
                accessed -= 1
                if below.ticket:
                    lower._enter(node.copies[0])
        for node in reversed(nodes):
            extent = node.copies[0]
            use = extent.history
            if not isinstance(use, NodeUse):
                use = use_of(extent)
            use.accessed = accessed
            accessed -= 1
            if use.ticket:
                self._enter(extent)

    def split(self, front: Extent, extent: Extent, lower: "RadixOrder | None" = None) -> None:
        """``front`` was split off the node of ``extent``: both count as used, the later part last. ``lower``: their order, if
        it is another.
        """
        self._clock += 2 * STEP
        use_of(front).accessed = self._clock - STEP
        use = use_of(extent)
        use.accessed = self._clock
        if use.ticket:
            (lower or self)._enter(extent)

    def expose(self, extent: Extent) -> None:
        """Note that the last child of ``extent`` was evicted."""
        if extent.refs:
            return
        heap = self._heap
        if not heap or heap[0] in self._candidates:
            self._enter(extent)
            return
        # The child's number is the first still, and mostly its parent comes next.
        number = self._number(extent)
        size = len(heap)
        if (size < 2 or number < heap[1]) and (size < 3 or number < heap[2]):
            heap[0] = number
        else:
            heapreplace(heap, number)

    # -- as EvictionOrder says --------------------------------------------------------------------------------------

    def push(self, extent: Extent) -> None:
        self._released[extent] = None
        if extent.node is not None and not extent.node.kids:
            self._enter(extent)

    def push_front(self, extent: Extent) -> None:
        self.push(extent)

    def remove(self, extent: Extent) -> None:
        del self._released[extent]
        history = use_of(extent)
        if history.ticket:
            del self._candidates[history.ticket]
            history.ticket = 0

    def insert_after(self, extent: Extent, front: Extent) -> None:
        self._released[front] = None  # ``extent`` continues it, so it is no leaf

    def expire(self) -> None:
        """No priority runs out."""

    def first(self) -> Extent | None:
        """Return the next victim, if there is one."""
        heap, candidates = self._heap, self._candidates
        while heap:
            extent = candidates.get(heap[0])
            if extent is not None:
                if extent.node is not None and not extent.node.kids:
                    return extent
                del candidates[heap[0]]  # something continues it since
                use_of(extent).ticket = 0
            heappop(heap)
        return None

    def head(self) -> Extent:
        extent = self.first()
        if extent is None:
            raise IndexError("no extent is left to evict")
        return extent

    def __iter__(self) -> Iterator[Extent]:
        kids = {extent.node: extent.node.kids for extent in self._released if extent.node is not None}
        heap = [
            (self._rank(use_of(e)), number, e) for number, e in enumerate(self._released) if e.node and not kids[e.node]
        ]
        heapify(heap)
        number = len(kids)
        behind = dict(self._released)
        while heap:
            extent = heappop(heap)[2]
            del behind[extent]
            yield extent
            parent = extent.node.parent if extent.node is not None else None
            while parent is not None and (parent in kids or not parent.copies):
                kids[parent] = kids.get(parent, parent.kids) - 1
                if kids[parent]:
                    break
                if parent.copies:
                    number += 1
                    heappush(heap, (self._rank(use_of(parent.copies[0])), number, parent.copies[0]))
                    break
                parent = parent.parent
        yield from behind  # what is held continues them

    def _enter(self, extent: Extent) -> None:
        heap = self._heap
        if len(heap) > 64 + 2 * len(self._candidates):
            self._heap = heap = list(self._candidates)
            heapify(heap)
        heappush(heap, self._number(extent))

    def _number(self, extent: Extent) -> int:
        """Number ``extent`` by its rank, and by order of entry where nodes have the same rank."""
        use = use_of(extent)
        if use.ticket:
            del self._candidates[use.ticket]
        if self._by_access:
            number = use.accessed
        else:
            self._tickets += 1
            number = (self._rank(use) << TICKET_BITS) + self._tickets
        use.ticket = number
        self._candidates[number] = extent
        return number


def use_of(extent: Extent) -> NodeUse:
    """Return the use of a node's extent; of one that was never inserted, none."""
    history = extent.history
    if not isinstance(history, NodeUse):
        history = extent.history = NodeUse()
    return history
