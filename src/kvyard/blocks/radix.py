"""Full attention cached as SGLang's radix tree caches it, with or without sliding windows beside it.

Blocks are pages, and the map of cached copies is the tree. Three things differ from vLLM's way. Pages get into the tree when
they are *inserted*: after a prompt, or a chunk of it, and at the end of a request, never while it decodes. A page that the
tree has already is freed, and the request goes on with the tree's: there is one copy of everything. Matching and inserting
split nodes and count as uses of them, and eviction takes whole leaves (``kvyard.blocks.eviction.radix``).
"""

from typing import ClassVar, NamedTuple

from kvyard.blocks.coordinator import Hit
from kvyard.blocks.eviction.radix import RadixOrder, use_of
from kvyard.blocks.extent import Extent, Node
from kvyard.blocks.group import Group, GroupHit
from kvyard.blocks.host_pages import HostPages, PageCopy
from kvyard.blocks.node_parts import part_of
from kvyard.blocks.request import Request
from kvyard.blocks.state_slots import StateSlots
from kvyard.blocks.table import BlockTable
from kvyard.blocks.window_pages import WindowPages
from kvyard.hashing import Chain
from kvyard.hashing.prefix_tree import agree_until


class RadixGroup(Group):
    """Pages of one group of full attention in a radix tree."""

    inserts: ClassVar[bool] = True
    caches = True
    """True if requests are inserted."""
    pairs = 0
    """1 if pages are of token pairs, as for EAGLE, so that a page is known with the token after it; else 0."""
    host: HostPages | None = None
    """Pages of host memory, if there is any."""
    beyond: "Beyond"
    """Nodes of the host that extend the latest match."""
    root_priority = 0
    """The highest priority that was inserted."""

    @property
    def windows(self) -> WindowPages | None:
        """Pages of sliding-window layers, where the model has any."""
        return self.pool.windows

    @property
    def order(self) -> RadixOrder:
        """The tree's eviction policy."""
        return self.pool.radix.order

    def chain_of(self, request: Request) -> Chain:
        if self.pairs:
            return request.pairs()
        return request.chain if self._native else request.view(self.block_size)

    def register(self, request: Request, table: BlockTable, tokens: int) -> None:
        """Register nothing: pages enter the tree by an insert only."""

    def order_by_weight(self, ends: list[Node | None]) -> list[int]:
        """Return indices of ``ends``, where matches ended, with the branches first that most matches ended in (SGLang's
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
        nodes, found = self._find(request, max(0, tokens - self.pairs) // self.block_size)
        stop = nodes[-1].stop if nodes else 0
        reached = stop + (self.beyond.tokens // self.block_size if self.host is not None else 0)
        boundary = found * self.block_size if found > reached else 0
        if boundary and self.pool.states is not None:
            tracking = self.pool.states.tracking
            boundary = boundary // tracking.grid * tracking.grid if tracking is not None else 0
            boundary = boundary if boundary > stop * self.block_size else 0
        return Hit(request, stop * self.block_size, (GroupHit(stop, 0, nodes),), boundary, self.pool.version)

    def touch(self, request: Request) -> None:
        """Count as a match of all the tokens of ``request``."""
        self._find(request, len(self.chain_of(request).keys))

    def _find(self, request: Request, pages: int) -> tuple[list[Node], int]:
        """Return the nodes that a request can reuse of its first ``pages`` pages, and how many of these the tree has. Counts as
        a use of those nodes; where the tree parts with the request a node is split.
        """
        keys = self.chain_of(request).keys
        nodes, position = self.map.walk(keys, min(pages, len(keys)), through_holes=False)
        if nodes and nodes[-1].stop > position:
            nodes[-1] = self._split(nodes[-1], position)
        windows, host = self.pool.windows, self.host
        if host is None:
            states = self.pool.states
            if windows is not None:
                del nodes[windows.usable(nodes) :]
            if states is not None:
                del nodes[states.usable(nodes) :]
                while windows is not None and (usable := windows.usable(nodes)) < len(nodes):
                    del nodes[usable:]
                    del nodes[states.usable(nodes) :]
            if nodes:
                if windows is not None:
                    windows.use(nodes[-1])
                if states is not None:
                    states.use(nodes[-1])
            self.order.use_path(nodes)
            return nodes, position
        beyond, stop = host.walk(keys, min(pages, len(keys)), position)
        if beyond and beyond[-1].stop > stop:
            beyond[-1] = self._split_below(beyond[-1], stop, host)
        if windows is None:
            self.order.use_path(nodes, beyond, host.order)
            self.beyond = Beyond(beyond, [], (stop - position) * self.block_size if beyond else 0, [])
            return nodes, position
        return self._find_windows(nodes, beyond, windows, host), max(position, stop)

    def _find_windows(self, nodes: list[Node], beyond: list[Node], windows: WindowPages, host: HostPages) -> list[Node]:
        """Return the part of ``nodes``, with which a match leads down the device, that can be reused without a load.
        ``beyond``: the nodes of the host that follow them.
        """
        usable = nodes[: windows.usable(nodes)]
        path = [*nodes, *beyond]
        del path[windows.usable_below(path) :]
        if path:
            windows.use(path[-1])
        self.order.use_path(path[: len(nodes)], path[len(nodes) :], host.order)
        through = path[len(usable) : len(nodes)]
        tokens = sum([node.stop - node.start for node in path[len(nodes) :]])
        tokens += sum([node.stop - node.start for node in through if host.below(node) is not None])
        self.beyond = Beyond(path[len(nodes) :], through, tokens * self.block_size, windows.on_host(path))
        return usable

    def insert(self, request: Request, tokens: int, priority: int, *, finished: bool = False) -> None:
        """Insert the pages of the request's first ``tokens`` tokens, which it holds. Pages that the tree has are freed.
        ``finished``: the request is about to give back all that it holds.
        """
        table = request.tables[0]
        held = held_of(table)
        tokens -= self.pairs
        known, branch = tokens, held.branch
        states = self.pool.states
        if states is not None:
            branch = 0
            tokens = self._kept_tokens(held, states, tokens, finished=finished)
        elif (table.registered or 0) * self.block_size < branch <= tokens:
            tokens = branch
        last = tokens // self.block_size
        if priority > self.root_priority:
            self.root_priority = priority
        if not last:
            return
        windows = self.pool.windows
        if windows is not None and not finished:
            self.slide(table, tokens - 1)
        if states is not None:
            self._fork_state(held, states, finished=finished)
        path, matched = self._use(request, last, priority, held)
        self._adopt(table, path, matched)
        if self.host is not None:
            matched = self._restore(request, path, matched, last, priority, self.host)
        grows = matched < last
        if grows:
            self._grow(request, path, last, priority, held)
        if states is not None:
            if not grows:
                self.order.use(path[-1].copies[0])
            states.give(path[-1].copies[0])
        elif windows is None:
            prompt = (request.num_prompt_tokens - self.pairs) // self.block_size
            if 0 < prompt < last:
                self.root_priority = max(self.root_priority, priority + 1)
                self._use_prompt(path, prompt, priority + 1)
        if windows is not None:
            windows.use(path[-1])
            if not grows and self.host is not None:
                self.host.insert_ended(path[-1])
        if windows is not None or states is not None:
            self._lock(held, path[-1])
        table.registered = last
        held.inserted = max(held.inserted, last)
        if branch == tokens:
            held.branch = 0
            if not finished:
                self.slide(table, known - 1)

    def _grow(self, request: Request, path: list[Node], last: int, priority: int, held: "Held") -> None:
        """Add a leaf behind ``path`` with the request's pages up to position ``last``."""
        own = self._own(request, path, last)
        matched, order = own.start, self.order
        order.create(own, priority)
        chain = self.chain_of(request)
        leaf = self.map.append(chain, chain.keys[matched], own, path[-1] if path else None)
        windows = self.pool.windows
        if windows is not None and held.evicted < last:
            if held.evicted > matched:
                self._split(leaf, held.evicted)
            if leaf.stop - leaf.start > windows.pages:
                # A lock of the leaf's end must not hold more than a window.
                windows.enter(self._split(leaf, last - windows.pages).copies[0])
            windows.enter(own)
        order.insert_along(own, priority, counts=True, used=False)
        path.append(leaf)
        if self.host is not None:
            self.host.inserted(leaf)

    def _own(self, request: Request, path: list[Node], stop: int) -> Extent:
        """Return the request's own pages that follow ``path``, cut at position ``stop``."""
        table = request.tables[0]
        own = table.extents[-1]
        assert own.start == (path[-1].stop if path else 0), f"{request} holds its own pages in several extents"
        if stop < own.stop:
            rest = own.split_own(stop - own.start)
            table.extents.append(rest)
            table.starts.append(stop)
        return own

    def _restore(
        self, request: Request, path: list[Node], position: int, last: int, priority: int, host: HostPages
    ) -> int:
        """Copy nodes that follow ``path`` and that only the host has to the device, into the request's pages. Returns the
        position where they end.
        """
        keys, held, windows = self.chain_of(request).keys, held_of(request.tables[0]), self.pool.windows
        counted = held.inserted
        while position < last:
            below = host.map.starts.get(keys[position])
            if below is None:
                break
            self.order.use(below.copies[0])
            position = agree_until(below.keys, keys, position, min(below.stop, last))
            if position < below.stop:
                below = self._split_below(below, position, host)
            host.pool.pin(below.copies[0])
            host.note(below)
            own = self._own(request, path, position)
            own.history = below.copies[0].history
            self.map.enter(self.chain_of(request), own, path[-1].copies[0] if path else None)
            assert own.node is not None
            if windows is not None:
                self._recover(own.node, path, held, windows)
            self.order.insert_along(own, priority, position > counted, used=False)
            path.append(own.node)
        return position

    def insert_on_host(self, request: Request, above: Node | None, own: Extent | None) -> int | None:
        """Insert pages of ``request`` that the host got from storage, behind ``above``, a node of the host or the root. Pages
        that the host has are freed. Returns the position of the first page that it had not, if there is one.
        """
        host, order = self.host, self.order
        assert host is not None
        if above is not None:
            order.touch(self.map.starts.get(above.key, above).copies[0])
        if own is None:
            return None
        chain = self.chain_of(request)
        keys, position, stop = chain.keys, own.start, own.stop
        new: int | None = None
        while position < stop:
            node = self.map.starts.get(keys[position])
            lower = None if node is not None else host.order
            node = node or host.map.starts.get(keys[position])
            if node is None:
                break
            order.touch(node.copies[0], lower)
            part = agree_until(node.keys, keys, position, min(node.stop, stop))
            if part < node.stop:
                node = self._split(node, part) if lower is None else self._split_below(node, part, host)
            pages = own.split_front(part - position) if part < stop else own
            pages.forget_neighbours()
            above, position = node, part
            if host.writes_back or host.below(node) is not None:
                host.pool.release([pages])
            else:
                new = pages.start if new is None else new
                pages.history = node.copies[0].history  # the device's reference is its own
                host.add(chain, pages, node.parent)
        if position < stop:
            order.create(own, use_of(above.copies[0]).priority if above is not None else self.root_priority)
            host.add(chain, own, above)
            host.pool.release([own])
            new = position if new is None else new
        return new

    def load(self, hit: Hit) -> Hit | None:
        """Bring what the host adds to ``hit``, the latest match, to the device. Returns what the request has then; ``None`` if
        there is no room.
        """
        host, pool, windows, beyond = self.host, self.pool, self.pool.windows, self.beyond
        assert host is not None
        found = hit.groups[0].parts()
        nodes = [*found, *beyond.through]
        pages = sum([node.stop - node.start for node in beyond.nodes])
        held = pool.holds.pin([node.copies[0] for node in nodes])
        on_host = host.pool.holds.pin([node.copies[0] for node in beyond.nodes])
        # Where the hit ends, and where it will end.
        locked = [*windows.hold(found), *windows.hold([*nodes, *beyond.nodes])] if windows is not None else []
        pool.radix.make_full_room(pages)
        fits = pool.unnamed >= pages
        window_pages = sum([node.stop - node.start for node in beyond.windows])
        if fits and windows is not None:
            pool.radix.make_window_room(window_pages)
            fits = windows.free >= window_pages
        if windows is not None:
            windows.end_hold(locked)
        copy = PageCopy(held, on_host, pages + window_pages)
        if not fits:
            if windows is not None and windows.host is not None:
                for node in reversed(beyond.windows):
                    windows.host.renew(part_of(node.copies[0]))
            host.loaded(copy)
            return None
        for below in beyond.nodes:
            extent = Extent(pool.take(below.stop - below.start), below.start)
            extent.history = below.copies[0].history
            self.map.enter(below.chain, extent, nodes[-1].copies[0] if nodes else None)
            host.pool.pin(below.copies[0])
            held.append(extent)
            assert extent.node is not None
            nodes.append(extent.node)
        if windows is not None:
            windows.free += pages - window_pages
            starts = {node.start for node in beyond.windows}
            for node in nodes:
                if node.start in starts:
                    windows.enter(node.copies[0])
            copy = copy._replace(window=(nodes[-1], windows.lock(nodes[-1])))
        host.loads.append(copy)
        stop = nodes[-1].stop
        boundary = hit.shared_prefix_boundary
        return Hit(hit.request, stop * self.block_size, (GroupHit(stop, 0, nodes),), boundary, pool.version)

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

    def _use(self, request: Request, last: int, priority: int, held: "Held") -> tuple[list[Node], int]:
        """Walk down the tree along the request's first ``last`` pages, splitting the last node where the two part. Returns the
        nodes and how many pages they cover. Nodes that end after what it has inserted before count a hit.
        """
        order, windows, host = self.order, self.pool.windows, self.host
        counted = held.inserted
        path: list[Node] = []
        position = 0
        # What the request holds of the tree needs no search.
        for extent in request.tables[0].settle():
            node = extent.node
            if node is None or node.stop > last:
                break
            path.append(node)
        if path:
            position = path[-1].stop
            order.insert_held(path, priority, counted)
            if host is not None:
                for node in path:
                    if node.stop > counted:
                        host.inserted(node)
            if position == last:
                return path, last
        keys, starts = self.chain_of(request).keys, self.map.starts
        while position < last:
            node = starts.get(keys[position])
            if node is None:
                break
            position = agree_until(node.keys, keys, position, min(node.stop, last))
            plain = position == node.stop and windows is None
            if not plain:
                order.use(node.copies[0])
                if position < node.stop:
                    node = self._split(node, position)
                if windows is not None:
                    self._recover(node, path, held, windows)
            order.insert_along(node.copies[0], priority, position > counted, used=plain)
            path.append(node)
            if host is not None and position > counted:
                host.inserted(node)
        return path, position

    def _recover(self, node: Node, path: list[Node], held: "Held", windows: WindowPages) -> None:
        """Give window pages of a request that inserts ``node`` to the node if it has lost its own; free them otherwise. A part
        of the node that the request has given up, too, is split off and added to ``path``.
        """
        live = max(node.start, held.evicted)
        if live >= node.stop:
            return
        if part_of(node.copies[0]).present:
            windows.free += node.stop - live
            return
        if live > node.start:
            path.append(self._split(node, live))
        windows.enter(node.copies[0])

    def _adopt(self, table: BlockTable, path: list[Node], matched: int) -> None:
        """Hold the tree's copy of the first ``matched`` pages in place of the request's own."""
        extents = table.extents
        if not extents or extents[-1].start >= matched:
            return  # the common case: it holds all that there is of its tokens
        extents = table.settle()
        first = next((index for index, extent in enumerate(extents) if extent.node is None), len(extents))
        if first == len(extents) or extents[first].start >= matched:
            return
        low = extents[first].start
        own = self.pool.cut(extents[first:], low, matched)
        table.settle()
        shared = [node.copies[0] for node in path if node.start >= low]
        for extent in shared:
            self.pool.pin(extent)
        table.extents[first : first + len(own)] = shared
        table.starts = [extent.start for extent in table.extents]
        self.pool.release(own)

    def _split(self, node: Node, position: int) -> Node:
        """Split ``node`` at ``position``; returns the earlier part."""
        later: Extent = node.copies[0]
        below = self.host.below(node) if self.host is not None else None
        front = self.map.split(node, position)
        self.order.split(front.copies[0], later)
        if self.windows is not None:
            self.windows.split(front.copies[0], later)
        if below is not None and self.host is not None:
            below = self.host.map.split(below, position)
            below.copies[0].history = front.copies[0].history
            self._split_windows(front, node, below)
            self.host.note(below)
        return front

    def _split_below(self, node: Node, position: int, host: HostPages) -> Node:
        """Split a node that only the host has at position ``at``; returns the earlier part."""
        later: Extent = node.copies[0]
        front = host.map.split(node, position)
        self.order.split(front.copies[0], later, host.order)
        if self.windows is not None:
            self.windows.split(front.copies[0], later)
            self._split_windows(front, node, front)
        return front

    def _split_windows(self, front: Node, node: Node, below: Node) -> None:
        """``front``, which is ``below`` on the host, was split off ``node``: its window pages there are split, too."""
        windows = self.windows
        if windows is not None and windows.host is not None:
            windows.host.split(part_of(front.copies[0]), part_of(node.copies[0]), below.copies[0])

    # -- states -----------------------------------------------------------------------------------------------------

    def copy_state(self, hit: Hit) -> None:
        """Take a slot for the state that ``hit`` ends with, which the request goes on from."""
        pool, states, nodes = self.pool, self.pool.states, hit.groups[0].parts()
        assert states is not None
        if not states.free:
            path = pool.holds.pin([node.copies[0] for node in nodes])
            states.lock(nodes[-1])
            pool.radix.make_state_room(1)
            states.unlock(nodes[-1])
            pool.holds.end(path)
        assert states.free, "no state can be evicted"
        states.free -= 1

    @staticmethod
    def _kept_tokens(held: "Held", states: StateSlots, tokens: int, *, finished: bool) -> int:
        """Return tokens of a request up to the latest state that is kept of it, of ``tokens`` that it has computed."""
        tracking = states.tracking
        if tracking is None:
            return tokens if not held.cut else 0
        kept, held.track = held.track, 0
        return held.state_in_answer(states, tokens) if finished and not kept else kept

    def _fork_state(self, held: "Held", states: StateSlots, *, finished: bool) -> None:
        """Take a slot for the state that an insert leaves in the tree; a finished request gives its own."""
        if finished:
            held.slots -= 1
            return
        if states.tracking is not None and states.tracking.lazy and not states.free and held.end is not None:
            # The request has read the state that it began with.
            if not held.let_go:
                states.unlock(held.end)
            held.let_go = True
        self.pool.radix.make_state_room(1)
        assert states.free, "no state can be evicted"
        states.free -= 1

    # -- windows ----------------------------------------------------------------------------------------------------

    def adopt(self, table: BlockTable, hit: GroupHit, local: int, external: int) -> None:
        super().adopt(table, hit, local, external)
        states = self.pool.states
        if hit.nodes and (states is not None or self.pool.windows is not None):
            held = held_of(table)
            held.slots = 1 if states is not None else 0
            self._lock(held, hit.nodes[-1])

    def _lock(self, held: "Held", node: Node | None) -> None:
        """Read the window, and the state, that end with ``node`` in place of those before; ``None``: read no more."""
        windows, states, end = self.pool.windows, self.pool.states, held.end
        held.end = node
        if windows is not None:
            if end is not None:
                windows.unlock(end, held.low)
            if node is not None:
                held.low = windows.lock(node)
        if states is not None:
            if end is not None and not held.let_go:
                states.unlock(end)
            held.let_go = False
            if node is not None:
                states.lock(node)

    def slide(self, table: BlockTable, tokens: int, state: int = 0) -> None:
        """Free window pages of the request's own that are out of the window once ``tokens`` tokens are computed. As long as it
        may still be inserted a whole window in whole pages is kept, and the window that ends after ``state`` tokens, if that
        isn't 0.
        """
        windows = self.windows
        if windows is None:
            return
        held, page = held_of(table), self.block_size
        if tokens - windows.window <= held.evicted * page:
            return
        evicted = max(held.evicted, table.registered or 0)
        threshold = tokens - (windows.pages * page if self.caches else windows.window)
        if state:
            threshold = min(threshold, state - windows.window)
        held.evicted = max(evicted, threshold // page)
        windows.free += held.evicted - evicted

    def release(self, request: Request, table: BlockTable) -> None:
        windows, states = self.pool.windows, self.pool.states
        if windows is not None or states is not None:
            held = held_of(table)
            if windows is not None:
                windows.free += own_window_pages(table)
            if states is not None:
                states.free += held.slots + held.writing
                held.writing = 0
            self._lock(held, None)
        super().release(request, table)


class Beyond(NamedTuple):
    """Nodes in host memory that extend a match."""

    nodes: list[Node]
    """Nodes of the host that follow the device's."""
    through: list[Node]
    """Nodes of the device before those that can be reused once windows are loaded."""
    tokens: int
    """Tokens of both that the host has."""
    windows: list[Node]
    """Nodes of the match, from the root on, whose window pages have to be loaded."""


NOTHING = Beyond([], [], 0, [])


class Held:
    """Relation of a request to the tree, besides the pages in its table."""

    __slots__ = (
        "branch",
        "cut",
        "decodes",
        "drafts",
        "end",
        "evicted",
        "inserted",
        "kept",
        "let_go",
        "low",
        "missed",
        "place",
        "planned",
        "prefilled",
        "slots",
        "track",
        "writing",
    )

    def __init__(self) -> None:
        self.inserted = 0
        """Pages that it has inserted."""
        self.branch = 0
        """Tokens of it that the tree has, though not with a window to go on from; 0 for none. They are inserted first."""
        self.decodes = False
        """True if it has taken part in a decode pass."""
        self.drafts = False
        """True if it has slots for drafts, in whole pages."""
        self.evicted = 0
        """Position where its own window pages begin, if not with its own pages."""
        self.end: Node | None = None
        """The node that ends with the window, or the state, that it has locked ..."""
        self.low = 0
        """... and the position where the first node of that window begins."""
        self.slots = 0
        """Slots for states that it has."""
        self.track = 0
        """Tokens up to the state that is kept of its latest chunk, until it is inserted; 0 for none."""
        self.prefilled = 0
        """Tokens of it that are computed as a prompt."""
        self.missed: list[int] = []
        """Positions in its answer whose states were not kept."""
        self.kept = (0, 0)
        """Tokens up to the state that is kept of its answer, and up to the one before, where these are noted; 0 for none."""
        self.cut = False
        """True if its state has more tokens than its answer, of which the last drafts are cut off."""
        self.writing = 0
        """Slots beside its others that it has until the state is written which a pass in flight may bring it to."""
        self.place = 0
        """With drafts, which of the two places for states of its answer has the one that is kept."""
        self.planned: list[int] = []
        """Places that passes in flight write to, if they bring it to a state."""
        self.let_go = False
        """True if it has released the lock of the state that it began with."""

    def state_in_answer(self, states: StateSlots, tokens: int) -> int:
        """Return the tokens up to the state that is kept of its answer, if it has ``tokens`` tokens; 0 for none."""
        tracking = states.tracking
        if tracking is None:
            return 0
        if tracking.noted:
            return next((position for position in self.kept if position <= tokens), 0)
        return tracking.in_answer(self.prefilled, tokens, self.missed)


def held_of(table: BlockTable) -> Held:
    """Return the relation of the request with this table to the tree."""
    held = table.state
    if not isinstance(held, Held):
        held = table.state = Held()
    return held


def own_window_pages(table: BlockTable) -> int:
    """Return window pages of a request that the tree doesn't have."""
    return max(0, table.length - max(held_of(table).evicted, table.registered or 0))
