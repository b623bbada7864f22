"""Map of cached copies of one group: the runs of chains that are in the block pool, and where.

Chained hashes make this cheap. A hash names its whole prefix, so runs form a tree; a run is found by the hash of its first
block and compared by the hash of its last, and nothing in here is done once per block. Runs without a copy (*holes*) stay
in the tree while something behind them is cached: a window or a state may well be usable without them.

Every registration and every removal passes through here, and nothing else calls the sink.
"""

from collections.abc import Iterator

from kvyard.blocks.eviction import EvictionOrder
from kvyard.blocks.extent import Extent, Marks, Node
from kvyard.blocks.spans import Spans
from kvyard.events.types import Sink, Tier
from kvyard.hashing import Chain, Key, Keys, Run
from kvyard.hashing.prefix_tree import agree_until

__all__ = ["CacheMap", "Node"]


class CacheMap:
    """All cached copies of one group."""

    def __init__(self, group: int, order: EvictionOrder, sink: Sink | None = None, tier: Tier = Tier.G1) -> None:
        self.group = group
        self.order = order
        self.sink = sink
        self.tier = tier
        self.version = 0
        """Changes whenever something is moved or evicted; not by a split, after which everything can still be found."""
        self.starts: dict[Key, Node] = {}
        """Every node, holes included, by the hash of its first block."""
        self.marks: dict[Key, list[Extent]] = {}
        """Blocks that can also be found by a hash that ends inside them, first marked first."""

    def walk(self, keys: Keys, limit: int, through_holes: bool = True, index: int = 0) -> tuple[list[Node], int]:
        """Return the nodes along a chain's first ``limit`` blocks and how many of those blocks they cover.

        The last node may reach further than the chain agrees with it. Without ``through_holes`` it ends at the first hole.
        ``index`` is where to begin, if not at the start: a position where a node ends that the chain is known to contain.
        """
        nodes: list[Node] = []
        starts = self.starts
        while index < limit:
            node = starts.get(keys[index])
            if node is None or node.start != index or not (through_holes or node.copies):
                break
            nodes.append(node)
            index = node.stop
        if nodes:
            last = nodes[-1]
            index = agree_until(last.keys, keys, last.start, last.stop if last.stop < limit else limit)
        return nodes, index

    def spans(self, keys: Keys, limit: int) -> tuple[Spans, list[Node]]:
        """Return the intervals of a chain's first ``limit`` blocks that have copies, and the nodes along it, holes included."""
        nodes, end = self.walk(keys, limit)
        return covered(nodes, end), nodes

    def enter(self, chain: Chain, extent: Extent, before: Extent | None = None) -> list[Extent]:
        """Register ``extent``, whose content is now that of ``chain`` at its positions.

        Where part of that is cached already the extent becomes one more copy of it, split as the nodes are. Returns the
        parts in order; the last is ``extent`` itself. ``before``, if given, is a copy of something earlier on ``chain``.
        """
        start = extent.start
        stop = start + len(extent.ids)
        known = before.node if before is not None else None
        position = known.stop if known is not None else 0
        if position == start:
            key = chain.keys[position]
            if key not in self.starts:
                # Mostly text that is new, right behind what is cached.
                self.append(chain, key, extent, known)
                return [extent]
        nodes, position = self.walk(chain.keys, stop, index=position)
        if nodes and nodes[-1].stop > position:
            nodes[-1] = self.split(nodes[-1], position)
        parts: list[Extent] = []
        if position > start:
            for node in nodes:
                if node.stop <= start:
                    continue
                if node.start < start:
                    self.split(node, start)
                parts.append(self._add_copy(chain, node, extent))
        if position < stop:
            parent = nodes[-1] if nodes else known
            if position < start:
                # Text that is not cached leads to what is cached now.
                parent = self._grow(chain, position, start, parent)
                position = start
            node = self._grow(chain, position, stop, parent)
            parts.append(self._add_copy(chain, node, extent))
        return parts

    def append(self, chain: Chain, key: Key, extent: Extent, above: Node | None) -> Node:
        """Register all of ``extent`` as a new node behind ``above``, or behind the root; returns the node. ``key``, the hash of
        its first block, must not be known.
        """
        start = extent.start
        node = self.starts[key] = Node(self.group, chain, key, start, start + len(extent.ids), above)
        if above is not None:
            above.kids += 1
        extent.node = node
        node.copies.append(extent)
        if self.sink is not None:
            self.sink.entered(Run(chain, start, node.stop), self.group, self.tier, True)
        return node

    def enter_below(self, path: list[Node], extent: Extent) -> None:
        """Register ``extent`` as a copy of the last node of ``path``, which leads there from the root in another map, one cut
        at least wherever this one is. Nodes of the path that are not cached here become holes.
        """
        parent: Node | None = None
        for node in path:
            known = self.starts.get(node.key)
            if known is None:
                known = self._grow(node.chain, node.start, node.stop, parent)
            elif known.stop > node.stop:
                known = self.split(known, node.stop)
            parent = known
        assert parent is not None
        self._add_copy(path[-1].chain, parent, extent)

    def extend(self, last: Extent, ids: list[int], chain: Chain) -> bool:
        """Register ``ids`` as the continuation of ``last`` in place, if nothing stands against it; else change nothing.

        The common case of a growing request: its last registered extent is its own and the only copy, and nothing has
        continued that chain yet.
        """
        node = last.node
        if node is None or last.refs != 1 or node.kids or node.chain is not chain or len(node.copies) != 1:
            return False
        if last.marks is not None or last.history is not None:
            return False  # what was used before stands elsewhere in the eviction order than what is new
        last.ids += ids
        start = node.stop
        node.stop += len(ids)
        if self.sink is not None:
            self.sink.entered(Run(chain, start, node.stop), self.group, self.tier, True)
        return True

    def leave(self, extent: Extent) -> None:
        """Unregister ``extent`` from the map."""
        node = extent.node
        assert node is not None
        self.version += 1
        node.copies.remove(extent)
        extent.node = None
        if self.sink is not None:
            self.sink.left(Run(node.chain, node.start, node.stop), self.group, self.tier, not node.copies)
        if not node.copies:
            self._prune(node)

    def truncate(self, extent: Extent, count: int) -> bool:
        """Drop the last ``count`` blocks of ``extent`` from the map in place, if it is the only copy and nothing cached
        follows directly. Returns whether it did; the extent's ids are the caller's to cut.
        """
        node = extent.node
        if node is None or len(node.copies) != 1:
            return False
        stop = node.stop
        cut = stop - count
        if node.kids:
            # What follows may be a hole, left when its last blocks went: it takes in these as well.
            hole = node.hole
            if node.kids != 1 or hole is None or hole.parent is not node or hole.copies or not hole.chain.reaches(cut):
                return False
            del self.starts[hole.key]
            hole.start, hole.key = cut, hole.keys[cut]
            self.starts[hole.key] = hole
        node.stop = cut
        self.version += 1
        if self.sink is not None:
            # Before the node lets go of the hashes that the sink is going to ask for.
            self.sink.left(Run(node.chain, cut, stop), self.group, self.tier, True)
        if not (cut - node.start) % 16:
            self._slim(node)
        return True

    def mark(self, extent: Extent, run: Run) -> None:
        """Let the single block ``extent`` be found by ``run``, one hash unit that ends inside it.

        Needed where hashes are finer than blocks: a prompt that ends inside a block can be resumed there. A block known by
        a shorter run only is known by the longer one from now on.
        """
        key = run.chain.keys[run.start]
        if extent in self.marks.get(key, ()):
            return
        if extent.node is None and extent.marks is not None and extent.marks.runs[0].stop < run.stop:
            self.unmark(extent)
        holders = self.marks.setdefault(key, [])
        holders.append(extent)
        if extent.marks is None:
            extent.marks = Marks(self.group, [])
        extent.marks.runs.append(run)
        if self.sink is not None:
            self.sink.entered(run, self.group, self.tier, len(holders) == 1)

    def unmark(self, extent: Extent) -> None:
        """Take back all marks of ``extent``."""
        if extent.marks is None:
            return
        self.version += 1
        for run in extent.marks.runs:
            key = run.chain.keys[run.start]
            holders = self.marks[key]
            holders.remove(extent)
            if not holders:
                del self.marks[key]
            if self.sink is not None:
                self.sink.left(run, self.group, self.tier, not holders)
        extent.marks = None

    def move_marks(self, source: Extent, target: Extent) -> None:
        """Have ``target``, soon a copy of ``source``, be found in its place. Nothing enters or leaves."""
        marks = source.marks
        if marks is None:
            return
        self.version += 1
        target.marks, source.marks = marks, None
        for run in marks.runs:
            holders = self.marks[run.chain.keys[run.start]]
            holders.remove(source)
            holders.append(target)

    def split(self, node: Node, position: int) -> Node:
        """Split ``node`` and its copies at ``position``; returns the new earlier part, ``node`` keeps the later."""
        front = Node(self.group, node.chain, node.key, node.start, position, node.parent)
        front.kids = 1
        count = position - node.start
        for extent in node.copies:
            part = extent.split_front(count)
            part.node = front
            front.copies.append(part)
            if not part.refs:
                self.order.insert_after(extent, part)
        self.starts[node.key] = front
        key = node.key = node.keys[position]
        self.starts[key] = node
        node.parent = front
        node.start = position
        return front

    def between(self, nodes: list[Node], low: int, high: int) -> list[Node]:
        """Return the ``nodes``, in order of position, that lie in ``low`` to ``high``, split at both ends."""
        inside: list[Node] = []
        for node in nodes:
            if node.stop <= low or node.start >= high:
                continue
            if node.start < low:
                self.split(node, low)
            inside.append(self.split(node, high) if node.stop > high else node)
        return inside

    def detach(self, node: Node, chain: Chain) -> None:
        """Keep no more of ``chain`` alive for ``node`` than its own run; its request has ended."""
        self._slim(node)
        hole = node.parent
        if hole is not None and not hole.copies and hole.chain is chain:
            self._slim(hole)

    def clear(self) -> None:
        """Remove every copy at once without calling the sink: the pool announces clearing."""
        self.version += 1
        for node in self.starts.values():
            for extent in node.copies:
                extent.node = None
                extent.forget_neighbours()
        for holders in self.marks.values():
            for extent in holders:
                extent.marks = None
        self.starts.clear()
        self.marks.clear()

    def nodes(self) -> Iterator[Node]:
        """Return every node that has a copy, in no useful order."""
        return (node for node in self.starts.values() if node.copies)

    def extents(self) -> Iterator[Extent]:
        """Yield every extent that a lookup can find."""
        for node in self.nodes():
            yield from node.copies
        for holders in self.marks.values():
            yield from (extent for extent in holders if extent.node is None)

    def _grow(self, chain: Chain, start: int, stop: int, parent: Node | None) -> Node:
        key = chain.keys[start]
        node = self.starts[key] = Node(self.group, chain, key, start, stop, parent)
        if parent is not None:
            parent.kids += 1
        return node

    def _add_copy(self, chain: Chain, node: Node, extent: Extent) -> Extent:
        """Make the blocks of ``extent`` that ``node`` covers a copy of it; ``extent`` keeps what follows."""
        if not node.copies:
            # A hole may have released its tokens; the chain that fills it has them.
            node.chain, node.keys = chain, chain.keys
        count = node.stop - extent.start
        if len(extent.ids) > count:
            extent = extent.split_front(count)
        extent.node = node
        node.copies.append(extent)
        if self.sink is not None:
            self.sink.entered(Run(node.chain, node.start, node.stop), self.group, self.tier, len(node.copies) == 1)
        return extent

    def _prune(self, node: Node) -> None:
        """Take ``node``, which lost its last copy, out of the tree; or keep it as a hole while something is behind it."""
        if node.kids:
            if node.parent is not None:
                node.parent.hole = node
                self._join_holes(node)
            return
        ancestor: Node | None = node
        while ancestor is not None and not ancestor.kids and not ancestor.copies:
            del self.starts[ancestor.key]
            parent, ancestor.parent = ancestor.parent, None
            if parent is not None:
                parent.kids -= 1
                if parent.hole is ancestor:
                    parent.hole = None
                if parent.chain is ancestor.chain:
                    self._slim(parent)
            ancestor = parent

    def _slim(self, node: Node) -> None:
        """Free the part of ``node``'s chain beyond it, if that is much: it may be all that is left of a long prompt."""
        chain = node.chain.cut(node.start, node.stop, with_tokens=bool(node.copies))
        node.chain, node.keys = chain, chain.keys

    def _join_holes(self, node: Node) -> None:
        """Join a new hole with the hole before it, so that a window moving along a chain leaves one and not many."""
        parent = node.parent
        if parent is None or parent.copies or parent.kids != 1:
            return
        if node.chain.reaches(parent.start):
            del self.starts[node.key]
            node.start, node.key = parent.start, parent.key
            node.parent, parent.parent = parent.parent, None
            self.starts[node.key] = node
            if node.parent is not None:
                node.parent.hole = node


def covered(nodes: list[Node], limit: int) -> Spans:
    """Return the intervals that have copies, of ``nodes`` in order of position, up to position ``limit``."""
    spans: list[tuple[int, int]] = []
    for node in nodes:
        if node.copies:
            stop = node.stop if node.stop < limit else limit
            if spans and spans[-1][1] == node.start:
                spans[-1] = (spans[-1][0], stop)
            else:
                spans.append((node.start, stop))
    return spans
