"""Extents: consecutive physical blocks that are held, released and evicted together; the physical side of a run.

An extent lists the physical ids behind consecutive block positions of a sequence and counts its references once for all of
them. As soon as part of it is treated differently (hit, evicted, released) it is split. The *later* part keeps the object:
a reference to the extent as the end of something stays right, and finds the earlier part by following ``left``. So a split
touches no table; one that holds the whole notices when it next looks (``Table.settle``).

Nodes are the logical side, in the tree of cached copies; ``CacheMap`` finds, splits and joins them.
"""

from mypy_extensions import mypyc_attr

from kvyard.blocks.use import Use
from kvyard.hashing import Chain, Key, Run

DEFAULT_PRIORITY = 35
"""The retention priority of what no request asked to keep, on TensorRT-LLM's scale of 0 to 100."""
OVER = -1
"""Below that scale: the session is over that alone has used the blocks."""
KEPT_THEN_FIRST = 101
"""Above it: the session is about to come back. When its time has passed it falls to ``OVER`` ..."""
KEPT = 102
"""... or back to the default."""


@mypyc_attr(allow_interpreted_subclasses=True)
class UseHistory:
    """History of an extent for an eviction policy that learns: shared by all its blocks, and by the parts of a split."""

    __slots__ = ("label", "score", "serial", "size", "ticket", "use", "uses", "worth")

    def __init__(self) -> None:
        self.uses = 0
        """Requests that have used it, as far as the order counts."""
        self.use: Use | None = None
        """The last use."""
        self.size = 0
        """Tokens of the piece that it was computed with."""
        self.worth = 0.0
        """A figure of the order's own."""
        self.score = 0.0
        """Less is evicted earlier,"""
        self.serial = 0
        """and among equals what has the smaller number here."""
        self.ticket = 0
        """Names its valid entry where an order keeps void ones too; 0 while it is no candidate."""
        self.label = ""
        """The class or queue that it belongs to, where an order has several."""

    def copy(self) -> "UseHistory":
        """For the other part of a split."""
        copied = UseHistory()
        copied.uses, copied.use, copied.size = self.uses, self.use, self.size
        copied.worth, copied.score, copied.serial, copied.label = self.worth, self.score, self.serial, self.label
        return copied


class Extent:
    """Physical blocks ``ids`` at positions ``start`` onwards; held while ``refs`` > 0, else waiting to be evicted."""

    __slots__ = (
        "account",
        "after",
        "before",
        "deadline",
        "expires",
        "history",
        "ids",
        "left",
        "marks",
        "node",
        "owner",
        "priority",
        "refs",
        "right",
        "start",
    )

    def __init__(self, ids: list[int], start: int, refs: int = 1, priority: int = DEFAULT_PRIORITY) -> None:
        self.ids = ids
        self.start = start
        self.refs = refs
        self.priority = priority
        self.account = 0
        """Owner in the pool's ledger."""
        self.expires: int | None = None
        """Nanoseconds for which a raised priority lasts once the extent is free; ``None`` for ever."""
        self.deadline: int | None = None
        """End of the raised priority, while the extent is free."""
        self.owner = ""
        """The session that alone has used it, where that is noted (``kvyard.blocks.ownership``)."""
        self.node: Node | None = None
        """Run of the chain that this is a copy of; ``None`` while its content has no name."""
        self.marks: Marks | None = None
        """Shorter runs that end inside this (single) block and can be found too; see ``CacheMap.mark``."""
        self.left: Extent | None = None
        self.right: Extent | None = None
        self.history: UseHistory | None = None
        """History for an eviction policy that learns; ``None`` before its first use, and under other policies."""
        # Neighbours in the eviction order while the extent has no reference.
        self.before: Extent | None = None
        self.after: Extent | None = None

    @property
    def stop(self) -> int:
        """The position after the last block."""
        return self.start + len(self.ids)

    @property
    def cached(self) -> bool:
        """Return true if a lookup can find any of this content."""
        return self.node is not None or self.marks is not None

    def split_front(self, count: int) -> "Extent":
        """Give the first ``count`` blocks to a new extent and return it; this one keeps the rest.

        The caller puts the new extent where it belongs (a node's copies, the eviction order).
        """
        ids = self.ids
        front = Extent(ids[:count], self.start, self.refs, self.priority)
        front.expires = self.expires
        front.owner = self.owner
        front.account = self.account
        if self.history is not None:
            front.history = self.history.copy()
        del ids[:count]
        self.start += count
        left = front.left = self.left
        if left is not None:
            left.right = front
        front.right = self
        self.left = front
        return front

    def split_own(self, count: int) -> "Extent":
        """Keep the first ``count`` blocks; returns an extent of the rest. For unnamed blocks that one table alone holds."""
        ids = self.ids
        rest = Extent(ids[count:], self.start + count, self.refs, self.priority)
        rest.expires, rest.owner, rest.account = self.expires, self.owner, self.account
        del ids[count:]
        return rest

    def forget_neighbours(self) -> None:
        """Cut the links to the other parts of a former whole, once they can't be followed any more."""
        if self.left is not None:
            self.left.right = None
            self.left = None
        if self.right is not None:
            self.right.left = None
            self.right = None

    def __repr__(self) -> str:
        name = "cached" if self.cached else "unnamed"
        return f"Extent({self.start}..{self.stop}, {name}, refs={self.refs}, ids={self.ids})"


class Node:
    """Blocks ``start`` to ``stop`` of a chain, all in the same condition: each copy covers exactly these."""

    __slots__ = ("chain", "copies", "group", "hole", "key", "keys", "kids", "parent", "start", "stop")

    def __init__(self, group: int, chain: Chain, key: Key, start: int, stop: int, parent: "Node | None") -> None:
        self.group = group
        """Group of the map that it is in."""
        self.chain = chain
        self.keys = chain.keys
        self.key = key
        """The hash of the first block."""
        self.start = start
        self.stop = stop
        self.parent = parent
        self.kids = 0
        self.hole: Node | None = None
        """The child that last became a hole: where this node ends, once its last blocks have been evicted."""
        self.copies: list[Extent] = []
        """First registered first: a lookup takes the first."""

    def __repr__(self) -> str:
        return f"Node({self.start}..{self.stop}, copies={len(self.copies)}, kids={self.kids})"


class Marks:
    """Runs of one hash unit each that end inside a block and by which it can be found as well."""

    __slots__ = ("group", "runs")

    def __init__(self, group: int, runs: list[Run]) -> None:
        self.group = group
        self.runs = runs
