"""One group at work: its rule applied to the tables of requests and to the pool.

A group answers for itself only. In which order groups act is the coordinator's business, and whether an allocation happens
at all is the manager's.
"""

from __future__ import annotations

from collections.abc import Callable

from kvyard.blocks.demand import Demand, GroupHit
from kvyard.blocks.extent import Extent, Node
from kvyard.blocks.pool import Pool
from kvyard.blocks.registration import register_kept, register_tail, resume_points
from kvyard.blocks.request import Request
from kvyard.blocks.spans import Spans
from kvyard.blocks.spec import ConfigError, GroupSpec
from kvyard.blocks.table import Table
from kvyard.hashing import Chain


class Group:
    """A group of attention layers over the shared pool."""

    restless = False
    """Whether this kind has something to do in every step."""
    registers_always = False
    """Whether there may be something to register even if no block has been completed."""
    estimates = False
    """Whether ``need`` may be less than what it ``uses``."""

    def __init__(
        self, index: int, spec: GroupSpec, pool: Pool, *, hash_block_size: int, max_in_flight: int, max_model_len: int
    ) -> None:
        self.index = index
        self.spec = spec
        self.pool = pool
        self.rule = spec.rule()
        self.map = pool.maps[index]
        self.block_size = spec.block_size
        self.hash_block_size = hash_block_size
        self._native = spec.block_size == hash_block_size
        self.is_full = spec.is_full
        self.spare = spec.spec_blocks * spec.block_size
        """Tokens' worth of blocks at the table's end that are not for ordinary tokens."""
        self.cap = self.rule.cap(max_in_flight, max_model_len)
        self.eagle = False
        """Whether hits of this group give up their last block; the coordinator decides."""
        self.use_eagle = False
        """Whether the engine drafts at all, with a head that reads this group or not."""
        self.eagle_unit = 0
        """The scheduler's block size where any group has a draft head, else 0; the coordinator decides."""
        self.register_unit = 0
        """How many tokens at a time become registrable; 0 if that is hard to say. The coordinator decides."""
        self.alignment = 0
        """What hits of all groups together end on; the coordinator decides."""
        self.retention: int | None = None
        """How sparsely windows and states are kept; the coordinator is told."""
        self.keeps_all = True
        """Whether every full block is worth registering."""
        self.copies: list[tuple[Extent, Extent]] = []
        """Block copies that the engine has yet to run, source and destination."""
        self.watch: Callable[[Request, Group, int, int], None] | None = None
        """Told of each registration before it happens (first and last position); for recorders."""

    def chain_of(self, request: Request) -> Chain:
        """The request's chain at this group's block size."""
        return request.chain if self._native else request.view(self.block_size)

    def spans(self, request: Request, limit: int) -> tuple[Spans, list[Node]]:
        """The cached intervals among the chain's first ``limit`` tokens, and the nodes they lie in."""
        keys = self.chain_of(request).keys
        blocks = min(limit // self.block_size, len(keys))
        if self.is_full:
            nodes, at = self.map.walk(keys, blocks, through_holes=False)
            return ([(0, at)] if at else []), nodes
        return self.map.spans(keys, blocks)

    def required(self, demand: Demand) -> int:
        """How long the table must be to meet ``demand``."""
        return -(-demand.slots // self.block_size)

    def need(self, request: Request, table: Table, hit: GroupHit, demand: Demand) -> int:
        """How many free blocks it takes to meet ``demand``, by the count that admission goes by."""
        required = self.required(demand)
        if demand.whole and self.cap is not None:
            required = min(required, self.cap)
        if table.registered is not None:
            return max(required - table.length, 0)
        rule = self.rule
        skipped = rule.stale(demand.total) // self.block_size if rule.forgets else 0
        held = table.length + hit.blocks
        fresh = required - (skipped if skipped > held else held)
        if fresh < 0:
            fresh = 0
        if not hit.blocks:
            return fresh
        # A cached block without a reference stands in the line of free ones, and pinning takes it out.
        return fresh + hit.free_blocks(max(0, skipped - table.length))

    def uses(self, request: Request, table: Table, hit: GroupHit, demand: Demand) -> int:
        """How many free blocks are gone once ``demand`` is met."""
        return self.need(request, table, hit, demand)

    def adopt(self, table: Table, hit: GroupHit, local: int, external: int) -> None:
        """Pin the hit's blocks that will still be read and put them into the (empty) table; the rest become null.

        ``local`` tokens are hit, ``external`` ones will be loaded after them.
        """
        rule = self.rule
        skipped = rule.stale(local + external) // self.block_size if rule.forgets else 0
        low, high = max(hit.low, skipped), hit.blocks
        pool = self.pool
        if low < high:
            for node in hit.parts():
                if node.stop <= low or node.start >= high:
                    continue
                if node.start < low:
                    self.map.split(node, low)
                part = self.map.split(node, high) if node.stop > high else node
                extent = part.copies[0]
                pool.pin(extent)
                table.append(extent)
        table.length = max(skipped, high)
        table.registered = table.length

    def take_external(self, table: Table, total: int, external: int) -> None:
        """Take blocks for tokens that will be loaded from elsewhere, as far as they will still be read."""
        if min(total - self.rule.stale(total), external) > 0:
            self.take(table, max(0, -(-total // self.block_size) - table.length))

    def take_new(self, table: Table, demand: Demand) -> list[int]:
        """Take blocks until the table meets ``demand``; returns the new ids."""
        return self.take(table, self.required(demand) - table.length)

    def take(self, table: Table, count: int) -> list[int]:
        """Take ``count`` blocks, if that is more than none, to the table's end; returns their ids."""
        if count <= 0:
            return []
        ids = self.pool.take(count)
        table.add_blocks(ids.copy())
        return ids

    def drop_stale(self, request: Request, table: Table, processed: int) -> None:
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
            self.pool.release_front(first, count)
            return
        extent = table.crossing(position)
        if extent is not None:
            self.pool.split(extent, position - extent.start)
        self.pool.release(table.drop_before(position))

    def register(self, request: Request, table: Table, tokens: int) -> None:
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
            kept = self._worth(request, first, last)
        register_kept(self.map, chain, request, table, kept)

    def _worth(self, request: Request, first: int, last: int) -> list[tuple[int, int]]:
        boundaries = resume_points(request, self.eagle_unit) if self.retention is not None else ()
        kept = self.rule.worth(first, last, self.alignment, self.eagle, self.retention, boundaries)
        return [(first, last)] if kept is None else kept

    def _block_at(self, table: Table, position: int) -> Extent | None:
        """The block at ``position`` as an extent of its own, split off if need be; ``None`` where the table is null."""
        for extent in table:
            if extent.start <= position < extent.stop:
                block = self.pool.isolate(extent, position - extent.start)
                table.settle()
                return block
        return None

    def release(self, request: Request, table: Table) -> None:
        """Give all blocks back, last position first."""
        # What stays cached must not keep the whole request in memory: neither what it held last nor what it gave back before.
        chain = self.chain_of(request)
        extents = table.settle()
        if self.rule.forgets:
            nodes = self.map.walk(chain.keys, min(table.length, len(chain.keys)))[0]
        else:
            nodes = [extent.node for extent in extents if extent.node is not None]
        for node in nodes:
            if node.chain is chain:
                self.map.detach(node, chain)
        self.pool.release(extents)

    def begin_step(self) -> None:
        """A scheduler step begins."""


def group_class(spec: GroupSpec, caching: bool, hash_block_size: int) -> type[Group]:
    """The class that serves ``spec``. Raises ``ConfigError`` where its kind names something else than a group."""
    choose = spec.attention.group_class
    found: type[object] = Group if choose is None else choose(spec, caching, hash_block_size)
    if not issubclass(found, Group):
        raise ConfigError(f"attention kind {spec.kind} is served by {found.__name__}, which is no Group")
    return found
