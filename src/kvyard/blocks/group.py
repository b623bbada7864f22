"""One attention group: its rule applied to the tables of requests and to the pool.

A group knows only itself. The coordinator decides the order in which groups act, and the manager decides if an allocation
happens at all.
"""

from collections.abc import Callable
from typing import ClassVar

from mypy_extensions import mypyc_attr

from kvyard.blocks.extent import Extent, Node
from kvyard.blocks.hints import Hints
from kvyard.blocks.ownership import claim
from kvyard.blocks.pool import Pool
from kvyard.blocks.registration import register_kept, register_tail, resume_points
from kvyard.blocks.request import Request
from kvyard.blocks.spans import Spans
from kvyard.blocks.spec import ConfigError, GroupSpec
from kvyard.blocks.table import BlockTable
from kvyard.blocks.use import Use
from kvyard.hashing import Chain
from kvyard.integers import ceil_div


class GroupHit:
    """Result of a lookup for one group: blocks ``low`` to ``blocks`` are cached, those before are null."""

    __slots__ = ("blocks", "low", "nodes", "tail")

    def __init__(self, blocks: int, low: int, nodes: list[Node], tail: Extent | None = None) -> None:
        self.blocks = blocks
        self.low = low
        self.nodes = nodes
        self.tail = tail
        """The last block, where the hit ends inside it and it is known by a mark only."""

    def parts(self) -> list[Node]:
        """``nodes``, and what others split off them since the lookup: the earlier part of a node is its parent."""
        expected = 0
        for node in self.nodes:
            if node.start != expected:
                break
            expected = node.stop
        else:
            return self.nodes
        parts: list[Node] = []
        expected = 0
        for node in self.nodes:
            split = [node]
            while split[-1].start > expected:
                parent = split[-1].parent
                assert parent is not None
                split.append(parent)
            parts += reversed(split)
            expected = node.stop
        return parts

    def free_blocks(self, skip: int) -> int:
        """Return how many of its blocks from position ``skip`` on have no reference, so that pinning them uses up free ones."""
        blocks, low, nodes, tail = self.blocks, self.low, self.nodes, self.tail
        if skip > low:
            low = skip
        high = blocks if tail is None else blocks - 1
        total = 0
        for node in nodes if len(nodes) == 1 and not nodes[0].start else self.parts():
            first = node.start if node.start > low else low
            last = node.stop if node.stop < high else high
            if first < last and not node.copies[0].refs:
                total += last - first
        if tail is not None and low < blocks and not tail.refs:
            total += 1
        return total

    def ids(self) -> list[int]:
        """Return the physical ids, 0 for null, as long as the hit."""
        listed = [0] * self.blocks
        for node in self.parts():
            low, high = max(self.low, node.start), min(self.blocks - (self.tail is not None), node.stop)
            if low < high:
                listed[low:high] = node.copies[0].ids[low - node.start : high - node.start]
        if self.tail is not None:
            listed[-1:] = self.tail.ids
        return listed


NO_HIT = GroupHit(0, 0, [])


class Demand:
    """Demand of an allocation on every group."""

    __slots__ = ("encoder", "local", "main", "slots", "total", "whole")

    def __init__(self, slots: int, main: int, local: int, total: int, encoder: int = 0, whole: bool = False) -> None:
        self.slots = slots
        """Tokens that need a slot, look-ahead included."""
        self.main = main
        """Tokens that need a slot without look-ahead."""
        self.local = local
        """Tokens that are computed here: before, and by the hit."""
        self.total = total
        """Tokens that are computed here or will be loaded."""
        self.encoder = encoder
        """Encoder tokens, for cross attention."""
        self.whole = whole
        """True for the admission of a whole sequence: no more counts than it can ever hold at once."""

    def unloaded(self) -> "Demand":
        """Return this demand with nothing loaded."""
        return Demand(self.slots, self.main, self.local, self.local, self.encoder, self.whole)


@mypyc_attr(allow_interpreted_subclasses=True)  # kinds that aren't compiled derive from it
class Group:
    """A group of attention layers over the shared pool."""

    inserts: ClassVar[bool] = False
    """True if blocks get their names when the engine inserts them, and never by themselves."""
    acts_every_step: ClassVar[bool] = False
    """True if this kind has work in every step."""
    registers_always: ClassVar[bool] = False
    """True if there may be something to register even if no block has been completed."""
    estimates: ClassVar[bool] = False
    """True if ``need`` may be less than the blocks it ``uses``."""

    def __init__(
        self, index: int, spec: GroupSpec, pool: Pool, *, hash_block_size: int, max_in_flight: int, max_model_len: int
    ) -> None:
        self.index = index
        self.spec = spec
        self.pool = pool
        self.rule = spec.rule()
        self.forgets: bool = self.rule.forgets
        """The rule's, which is read from its class and takes longer to ask for."""
        self.map = pool.maps[index]
        self.block_size = spec.block_size
        self.hash_block_size = hash_block_size
        self._native = spec.block_size == hash_block_size
        self.is_full = spec.is_full
        self.shares = spec.shares
        """True if requests find blocks of this group cached."""
        self.spare = spec.spec_blocks * spec.block_size
        """Tokens' worth of blocks at the table's end that are not for ordinary tokens."""
        self.cap = self.rule.cap(max_in_flight, max_model_len)
        self.eagle = False
        """True if hits of this group give up their last block; set by the coordinator."""
        self.use_eagle = False
        """True if the engine drafts at all, with a head that reads this group or not."""
        self.eagle_unit = 0
        """The scheduler's block size where any group has a draft head, else 0; the coordinator decides."""
        self.register_unit = 0
        """Granularity, in tokens, of registration; 0 if it varies. Set by the coordinator."""
        self.alignment = 0
        """Alignment of hits of all groups together; set by the coordinator."""
        self.retention: int | None = None
        """Interval at which windows and states are kept; set by the coordinator."""
        self.marks_junctions = False
        """True if the state where a sibling stopped is kept, inside a block too; set by the coordinator."""
        self.keeps_all = True
        """True if every full block is worth registering."""
        self.copies: list[tuple[Extent, Extent]] = []
        """Block copies that the engine has yet to run, source and destination."""
        self.watch: Callable[[Request, Group, int, int], None] | None = None
        """Told of each registration before it happens (first and last position); for recorders."""

    def chain_of(self, request: Request) -> Chain:
        """Return the request's chain at this group's block size."""
        return request.chain if self._native else request.view(self.block_size)

    def spans(self, request: Request, limit: int) -> tuple[Spans, list[Node]]:
        """Return the cached intervals among the chain's first ``limit`` tokens, and the nodes they lie in."""
        keys = self.chain_of(request).keys
        blocks = min(limit // self.block_size, len(keys))
        if self.is_full:
            nodes, end = self.map.walk(keys, blocks, through_holes=False)
            return ([(0, end)] if end else []), nodes
        return self.map.spans(keys, blocks)

    def cached_extents(self, request: Request) -> list[Extent]:
        """Return the extents that a lookup of ``request`` would find here, without the last token, split where it ends."""
        keys = self.chain_of(request).keys
        blocks = min((request.num_tokens - 1) // self.block_size, len(keys))
        nodes, end = self.map.walk(keys, blocks, through_holes=not self.is_full)
        if nodes and nodes[-1].stop > end:
            nodes[-1] = self.map.split(nodes[-1], end)
        return [node.copies[0] for node in nodes if node.copies]

    def required(self, demand: Demand) -> int:
        """Return the length of the table that meets ``demand``."""
        return ceil_div(demand.slots, self.block_size)

    def need(self, request: Request, table: BlockTable, hit: GroupHit, demand: Demand) -> int:
        """Return the number of free blocks that it takes to meet ``demand``, as counted for admission."""
        required = self.required(demand)
        if demand.whole and self.cap is not None:
            required = min(required, self.cap)
        if table.registered is not None:
            return max(required - table.length, 0)
        skipped = self.rule.stale(demand.total) // self.block_size if self.forgets else 0
        held = table.length + hit.blocks
        fresh = required - (skipped if skipped > held else held)
        if fresh < 0:
            fresh = 0
        if not hit.blocks:
            return fresh
        # A cached block without a reference stands in the line of free ones, and pinning takes it out.
        return fresh + hit.free_blocks(max(0, skipped - table.length))

    def uses(self, request: Request, table: BlockTable, hit: GroupHit, demand: Demand) -> int:
        """Return the number of free blocks that are gone once ``demand`` is met."""
        return self.need(request, table, hit, demand)

    def adopt(self, table: BlockTable, hit: GroupHit, local: int, external: int) -> None:
        """Pin the hit's blocks that will still be read and put them into the (empty) table; the rest become null.

        ``local`` tokens are hit, ``external`` ones will be loaded after them.
        """
        skipped = self.rule.stale(local + external) // self.block_size if self.forgets else 0
        low, high = max(hit.low, skipped), hit.blocks
        if low < high:
            for node in self.map.between(hit.parts(), low, high):
                extent = node.copies[0]
                self.pool.pin(extent)
                table.append(extent)
        table.length = max(skipped, high)
        table.registered = table.length

    def take_external(self, table: BlockTable, total: int, external: int) -> None:
        """Take blocks for tokens that will be loaded from elsewhere, as far as they will still be read."""
        if min(total - self.rule.stale(total), external) > 0:
            self.take(table, max(0, ceil_div(total, self.block_size) - table.length))

    def take_new(self, table: BlockTable, demand: Demand) -> list[int]:
        """Take blocks until the table meets ``demand``; returns the new ids."""
        return self.take(table, self.required(demand) - table.length)

    def take(self, table: BlockTable, count: int) -> list[int]:
        """Take ``count`` blocks, if that is more than none, to the table's end; returns their ids."""
        if count <= 0:
            return []
        ids = self.pool.take(count, table.account)
        table.add_blocks(ids.copy())
        return ids

    def drop_stale(self, request: Request, table: BlockTable, processed: int) -> None:
        """Release the blocks that are never read again after ``processed`` tokens."""
        starts = table.starts
        position = min(self.rule.stale(processed) // self.block_size, table.length)
        if not starts or starts[0] >= position:
            return
        first = table.extents[0]
        count = position - first.start
        if first.start == starts[0] and count < len(first.ids):
            # A window moves on by a block: the first extent gives up its front, and the table is otherwise as it was.
            starts[0] = position
            self.release_extents(request, [self.pool.split(first, count)])
            return
        self.pool.cut(table, 0, position)
        self.release_extents(request, table.drop_before(position))

    def register(self, request: Request, table: BlockTable, tokens: int) -> None:
        """Offer the full blocks of the first ``tokens`` tokens to the map, as far as they can ever serve a hit."""
        first = table.registered or 0
        last = tokens // self.block_size
        if first >= last:
            return
        table.registered = last
        chain = request.chain if self._native else request.view(self.block_size)
        if self.watch is not None:
            self.watch(request, self, first, last)
        if self.keeps_all:
            if register_tail(self.map, chain, request, table, first, last):
                return
            kept = [(first, last)]
        else:
            boundaries = resume_points(request, self.eagle_unit) if self.retention is not None else ()
            worth = self.rule.worth(first, last, self.alignment, self.eagle, self.retention, boundaries)
            kept = [(first, last)] if worth is None else worth
        register_kept(self.map, chain, request, table, kept)

    def _block_at(self, table: BlockTable, position: int) -> Extent | None:
        """Return the block at ``position`` as an extent of its own, split off if need be; ``None`` where the table is null."""
        for extent in table:
            if extent.start <= position < extent.stop:
                block = self.pool.isolate(extent, position - extent.start)
                table.settle()
                return block
        return None

    def release(self, request: Request, table: BlockTable) -> None:
        """Give all blocks back, last position first."""
        extents = self.let_chain_go(request, table)
        self.pool.release(extents if self.pool.learner is None else self.note_use(request, extents))

    def release_extents(self, request: Request, extents: list[Extent]) -> None:
        """Release ``extents`` of ``request``, in order of position, and report the use to an eviction policy that learns."""
        self.pool.release(extents if self.pool.learner is None else self.note_use(request, extents))

    def note_use(self, request: Request, extents: list[Extent]) -> list[Extent]:
        """Tell the eviction policy that ``request`` used ``extents``; returns them as they are then."""
        learner = self.pool.learner
        if learner is None:
            return extents
        use = Use(request.id, request.num_tokens, request.facts)
        return learner.used(extents, use, self.block_size, self.spec.is_state)

    def let_chain_go(self, request: Request, table: BlockTable) -> list[Extent]:
        """Keep only the cached part of an ending request's chain. Returns its extents.

        What stays cached must not keep the whole request in memory: neither what it held last nor what it gave back before.
        """
        extents = table.settle()
        if not self.shares:
            return extents
        chain = self.chain_of(request)
        if self.forgets:
            nodes = self.map.walk(chain.keys, min(table.length, len(chain.keys)))[0]
        else:
            nodes = [extent.node for extent in extents if extent.node is not None]
        for node in nodes:
            if node.chain is chain:
                self.map.detach(node, chain)
        return extents

    def claim(self, request: Request, table: BlockTable, session: str, hints: Hints) -> None:
        """Note that ``request`` of ``session`` is about to free its blocks, with its ``hints`` about them."""
        extents = table.settle()
        if self.forgets and self.shares:
            # Most of what it used it has given back before.
            chain = self.chain_of(request)
            nodes, covered = self.map.walk(chain.keys, min(table.length, len(chain.keys)))
            if nodes and nodes[-1].stop > covered:
                nodes[-1] = self.map.split(nodes[-1], covered)
            extents = [node.copies[0] for node in nodes if node.copies]
        claim(self.pool.order, extents, session, hints)

    def take_copies(self) -> list[tuple[Extent, Extent]]:
        """Drain the copies that the engine has yet to run; both ends stay held until ``holds.end_copies`` receives them."""
        taken, self.copies = self.copies, []
        return taken

    def begin_step(self) -> None:
        """Begin a scheduler step."""


def group_class(spec: GroupSpec, caching: bool, hash_block_size: int) -> type[Group]:
    """Return the class that serves ``spec``. Raises ``ConfigError`` where its kind names something else than a group."""
    choose = spec.attention.group_class
    kind: type[object] = Group if choose is None else choose(spec, caching, hash_block_size)
    if not issubclass(kind, Group):
        raise ConfigError(f"attention kind {spec.kind} is served by {kind.__name__}, which is no Group")
    return kind
