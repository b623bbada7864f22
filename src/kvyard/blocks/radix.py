"""A group of full attention cached as SGLang's radix tree caches it.

Blocks are pages, and the map of cached copies is the tree. Three things differ from vLLM's way. Pages get into the tree when
they are *inserted*: after a prompt, or a chunk of it, and at the end of a request, never while it decodes. A page that the
tree has already is freed, and the request goes on with the tree's: there is one copy of everything. Matching and inserting
split nodes and count as uses of them, and eviction takes whole leaves (``kvyard.blocks.eviction.radix``).
"""

from kvyard.blocks.coordinator import Hit
from kvyard.blocks.eviction.radix import RadixOrder
from kvyard.blocks.extent import Extent, Node
from kvyard.blocks.group import Group, GroupHit
from kvyard.blocks.request import Request
from kvyard.blocks.table import Table
from kvyard.hashing.stretches import agree_until


class RadixGroup(Group):
    """Pages of one group of full attention in a radix tree."""

    inserts = True

    @property
    def order(self) -> RadixOrder:
        """The tree's eviction order."""
        radix = self.pool.radix
        assert radix is not None
        return radix

    def register(self, request: Request, table: Table, tokens: int) -> None:
        """Pages get into the tree by an insert only."""

    def order_by_weight(self, ends: list[Node | None]) -> list[int]:
        """Indices of ``ends``, where matches ended, with the branches first that most matches ended in (SGLang's
        ``dfs-weight``). Takes time by the number of nodes.
        """
        children: dict[Node | None, list[Node]] = {}
        for child in self.map.starts.values():
            children.setdefault(child.parent, []).append(child)
        here: dict[Node | None, list[int]] = {}
        for index, end in enumerate(ends):
            here.setdefault(end, []).append(index)
        weights: dict[Node | None, int] = {end: len(indices) for end, indices in here.items()}
        downwards: list[Node | None] = [None]
        for node in downwards:
            downwards += children.get(node, ())
        for node in reversed(downwards):
            weights[node] = weights.get(node, 0) + sum([weights[child] for child in children.get(node, ())])
        order: list[int] = []
        stack: list[tuple[Node | None, bool]] = [(None, False)]
        while stack:
            node, visited = stack.pop()
            if visited:
                order += here.get(node, ())
                continue
            stack.append((node, True))
            heaviest = sorted(children.get(node, ()), key=lambda child: -weights[child])
            stack += [(child, False) for child in reversed(heaviest)]
        return order

    def match(self, request: Request, tokens: int) -> Hit:
        """Return the longest prefix of the request's first ``tokens`` tokens in the tree, which counts as a use of it."""
        keys = self.chain_of(request).keys
        nodes, at = self.map.walk(keys, min(tokens // self.block_size, len(keys)), through_holes=False)
        if nodes and nodes[-1].stop > at:
            nodes[-1] = self._split(nodes[-1], at)
        self.order.use_path(nodes)
        return Hit(request, at * self.block_size, (GroupHit(at, 0, nodes),), 0, self.pool.version)

    def touch(self, request: Request) -> None:
        """Count as a match of all the tokens of ``request``."""
        keys = self.chain_of(request).keys
        nodes, at = self.map.walk(keys, len(keys), through_holes=False)
        if nodes:
            if nodes[-1].stop > at:
                nodes[-1] = self._split(nodes[-1], at)
            self.order.use_path(nodes)

    def insert(self, request: Request, tokens: int, priority: int) -> None:
        """Insert the pages of the request's first ``tokens`` tokens, which it holds. Pages that the tree has are freed."""
        table = request.tables[0]
        last = tokens // self.block_size
        if not last:
            return
        chain = self.chain_of(request)
        counted = table.state if isinstance(table.state, int) else 0
        path, matched = self._use(request, last, priority, counted)
        self._adopt(table, path, matched)
        if matched < last:
            own = table.extents[-1]
            assert own.start == matched, f"{request} holds its own pages in several extents"
            if last < own.stop:
                rest, own = own, own.split_front(last - matched)
                rest.forget_neighbours()
                table.replace(len(table.extents) - 1, [own, rest])
            self.order.create(own, priority)
            self.map.enter(chain, own, path[-1].copies[0] if path else None)
            assert own.node is not None
            path.append(own.node)
        table.registered = last
        table.state = max(counted, last)
        prompt = request.num_prompt_tokens // self.block_size
        if 0 < prompt < last:
            self._use_prompt(path, prompt, priority + 1)

    def _use_prompt(self, path: list[Node], prompt: int, priority: int) -> None:
        """Split the node where the first ``prompt`` pages end, so that the answer can be evicted without the prompt. The nodes
        of the prompt count as used once more, but without a hit, and as more important by one.
        """
        order = self.order
        for node in path:
            if node.start >= prompt:
                return
            if node.stop > prompt:
                order.use(node.copies[0])
                node = self._split(node, prompt)
                order.insert_along(node.copies[0], priority, counts=False, used=False)
                return
            order.insert_along(node.copies[0], priority, counts=False)

    def _use(self, request: Request, last: int, priority: int, counted: int) -> tuple[list[Node], int]:
        """Walk down the tree along the request's first ``last`` pages, splitting the last node where the two part. Returns the
        nodes and how many pages they cover. Nodes that end after ``counted`` pages count a hit.
        """
        order = self.order
        path: list[Node] = []
        at = 0
        # What the request holds of the tree needs no search.
        for extent in request.tables[0].settle():
            node = extent.node
            if node is None or node.stop > last:
                break
            at = node.stop
            order.insert_along(extent, priority, at > counted)
            path.append(node)
        keys, starts = self.chain_of(request).keys, self.map.starts
        while at < last:
            node = starts.get(keys[at])
            if node is None:
                break
            at = agree_until(node.keys, keys, at, min(node.stop, last))
            if at < node.stop:
                order.use(node.copies[0])
                node = self._split(node, at)
                order.insert_along(node.copies[0], priority, at > counted, used=False)
            else:
                order.insert_along(node.copies[0], priority, at > counted)
            path.append(node)
        return path, at

    def _adopt(self, table: Table, path: list[Node], matched: int) -> None:
        """Hold the tree's copy of the first ``matched`` pages in place of the request's own."""
        extents = table.extents
        if not extents or extents[-1].start >= matched:
            return  # the common case: it holds all that there is of its tokens
        extents = table.settle()
        at = next((index for index, extent in enumerate(extents) if extent.node is None), len(extents))
        if at == len(extents) or extents[at].start >= matched:
            return
        low = extents[at].start
        own = self.pool.cut(extents[at:], low, matched)
        table.settle()
        shared = [node.copies[0] for node in path if node.start >= low]
        for extent in shared:
            self.pool.pin(extent)
        table.extents[at : at + len(own)] = shared
        table.starts = [extent.start for extent in table.extents]
        self.pool.release(own)

    def _split(self, node: Node, at: int) -> Node:
        """Split ``node`` at position ``at``; returns the earlier part."""
        later: Extent = node.copies[0]
        front = self.map.split(node, at)
        self.order.split(front.copies[0], later)
        return front
