"""One group at work: its rule applied to the tables of requests and to the pool.

A group answers for itself only. In which order groups act is the coordinator's business, and whether an allocation happens
at all is the manager's.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from kvyard.blocks.cache_map import Node
from kvyard.blocks.extent import Extent
from kvyard.blocks.pool import Pool
from kvyard.blocks.request import Request
from kvyard.blocks.rules import Spans, rule_for
from kvyard.blocks.spec import GroupSpec
from kvyard.blocks.table import Table
from kvyard.hashing import Chain


class GroupHit(NamedTuple):
    """What a lookup found for one group: blocks ``low`` to ``blocks`` are cached, those before are null."""

    blocks: int
    low: int
    nodes: list[Node]
    tail: Extent | None = None
    """The last block, where the hit ends inside it and it is known by a mark only."""

    def free_blocks(self, skip: int) -> int:
        """How many of its blocks from position ``skip`` on nobody holds, so that pinning them uses up free ones."""
        low, high = max(self.low, skip), self.blocks - (self.tail is not None)
        total = 0
        for node in self.nodes:
            held = min(node.stop, high) - max(node.start, low)
            if held > 0 and not node.copies[0].refs:
                total += held
        if self.tail is not None and low < self.blocks and not self.tail.refs:
            total += 1
        return total

    def ids(self) -> list[int]:
        """The physical ids, 0 for null, as long as the hit."""
        listed = [0] * self.blocks
        for node in self.nodes:
            low, high = max(self.low, node.start), min(self.blocks - (self.tail is not None), node.stop)
            if low < high:
                listed[low:high] = node.copies[0].ids[low - node.start : high - node.start]
        if self.tail is not None:
            listed[-1:] = self.tail.ids
        return listed


NO_HIT = GroupHit(0, 0, [])


class Demand(NamedTuple):
    """What an allocation asks of every group."""

    slots: int
    """Tokens that need a slot, look-ahead included."""
    main: int
    """Tokens that need a slot without look-ahead."""
    local: int
    """Tokens that are computed here: before, and by the hit."""
    total: int
    """Tokens that are computed here or will be loaded."""
    encoder: int = 0
    """Encoder tokens, for cross attention."""
    whole: bool = False
    """Whether this is for the admission of a whole sequence: no more counts than it can ever hold at once."""


class Group:
    """A group of attention layers over the shared pool."""

    restless = False
    """Whether this kind has something to do in every step."""
    spare = 0
    """Tokens' worth of blocks at the table's end that are not for ordinary tokens."""
    registers_always = False
    """Whether there may be something to register even if no block has been completed."""

    def __init__(
        self, index: int, spec: GroupSpec, pool: Pool, *, hash_block_size: int, max_in_flight: int, max_model_len: int
    ) -> None:
        self.index = index
        self.spec = spec
        self.pool = pool
        self.rule = rule_for(spec)
        self.map = pool.maps[index]
        self.block_size = spec.block_size
        self.hash_block_size = hash_block_size
        self._native = spec.block_size == hash_block_size
        self.cap = self.rule.cap(max_in_flight, max_model_len)
        self.eagle = False
        """Whether hits of this group give up their last block; the coordinator decides."""
        self.use_eagle = False
        """Whether the engine drafts at all, with a head that reads this group or not."""
        self.eagle_unit = 0
        """The scheduler's block size where any group has a draft head, else 0; the coordinator decides."""
        self.register_unit = 0
        """How many tokens at a time become registrable; 0 if that is hard to say. The coordinator decides."""
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
        if self.spec.is_full:
            nodes, at = self.map.walk(keys, blocks, through_holes=False)
            return ([(0, at)] if at else []), nodes
        nodes, at = self.map.walk(keys, blocks)
        spans: list[tuple[int, int]] = []
        for node in nodes:
            if node.copies:
                stop = min(node.stop, at)
                if spans and spans[-1][1] == node.start:
                    spans[-1] = (spans[-1][0], stop)
                else:
                    spans.append((node.start, stop))
        return spans, nodes

    def required(self, demand: Demand) -> int:
        """How long the table must be to meet ``demand``."""
        return -(-demand.slots // self.block_size)

    def need(self, request: Request, table: Table, hit: GroupHit, demand: Demand) -> int:
        """How many free blocks it takes to meet ``demand``."""
        required = self.required(demand)
        if demand.whole and self.cap is not None:
            required = min(required, self.cap)
        if table.registered is not None:
            return max(required - table.length, 0)
        skipped = self.rule.stale(demand.total) // self.block_size
        fresh = max(required - max(skipped, hit.blocks + table.length), 0)
        if not hit.blocks:
            return fresh
        # A cached block that nobody holds stands in the line of free ones, and pinning takes it out.
        return fresh + hit.free_blocks(max(0, skipped - table.length))

    def adopt(self, table: Table, hit: GroupHit, local: int, external: int) -> None:
        """Pin the hit's blocks that will still be read and put them into the (empty) table; the rest become null.

        ``local`` tokens are hit, ``external`` ones will be loaded after them.
        """
        skipped = self.rule.stale(local + external) // self.block_size
        low, high = max(hit.low, skipped), hit.blocks
        pool = self.pool
        if low < high:
            for node in hit.nodes:
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
            self._take(table, max(0, -(-total // self.block_size) - table.length))

    def take_new(self, table: Table, demand: Demand) -> list[int]:
        """Take blocks until the table meets ``demand``; returns the new ids."""
        return self._take(table, self.required(demand) - table.length)

    def _take(self, table: Table, count: int) -> list[int]:
        if count <= 0:
            return []
        ids = self.pool.take(count)
        table.add_blocks(ids.copy())
        return ids

    def drop_stale(self, table: Table, processed: int) -> None:
        """Release the blocks that nobody will read again after ``processed`` tokens."""
        position = min(self.rule.stale(processed) // self.block_size, table.length)
        if not table.starts or table.starts[0] >= position:
            return
        extent = table.crossing(position)
        if extent is not None:
            self.pool.split(extent, position - extent.start)
        self.pool.release(table.drop_before(position))

    def register(self, request: Request, table: Table, tokens: int, alignment: int, retention: int | None) -> None:
        """Offer the full blocks of the first ``tokens`` tokens to the map, as far as they can ever serve a hit."""
        first = table.registered or 0
        last = tokens // self.block_size
        if first >= last:
            return
        table.registered = last
        if self.watch is not None:
            self.watch(request, self, first, last)
        if self.rule.keeps_all:
            kept = None
        else:
            boundaries = self.boundaries(request) if retention is not None else ()
            kept = self.rule.worth(first, last, alignment, self.eagle, retention, boundaries)
        if kept is None:
            if not request.retention and self._register_tail(request, table, first, last):
                return
            kept = [(first, last)]
        for low, high in kept:
            self._register_between(request, table, low, high)

    def boundaries(self, request: Request) -> list[int]:
        """Token positions where a later request with this prompt can resume, worth keeping under sparse retention."""
        if not self.eagle_unit:
            resume = [request.num_prompt_tokens - 1]
        else:
            # With a draft head the block after the boundary is computed again, for a resend and for a longer sibling.
            unit = self.eagle_unit
            ends = {(request.num_prompt_tokens - 1) // unit, request.num_prompt_tokens // unit}
            resume = sorted({max(end - 1, 0) * unit for end in ends})
        if request.shared_prefix_boundary:
            resume.append(request.shared_prefix_boundary)
        return resume

    def _register_tail(self, request: Request, table: Table, first: int, last: int) -> bool:
        """Register blocks from the start of the table's unnamed tail, if that is where they are: the common case.

        A request's own last extent is lengthened where possible, so that its chain stays in one piece as it grows.
        """
        extents = table.extents
        if not extents:
            return False
        tail = extents[-1]
        count = last - first
        if tail.start != first or tail.node is not None or tail.marks is not None or len(tail.ids) < count:
            return False
        chain = self.chain_of(request)
        before = extents[-2] if len(extents) > 1 else None
        whole = count == len(tail.ids)
        if before is not None and before.start + len(before.ids) == first:
            if self.map.extend(before, tail.ids[:count], chain):
                if whole:
                    extents.pop()
                    table.starts.pop()
                else:
                    tail.ids = tail.ids[count:]
                    tail.start += count
                    table.starts[-1] = tail.start
                return True
        else:
            before = None
        parts = self.map.enter(chain, tail if whole else tail.split_front(count), before)
        if not whole:
            tail.forget_neighbours()
            parts.append(tail)
        table.replace(len(extents) - 1, parts)
        return True

    def _register_between(self, request: Request, table: Table, low: int, high: int) -> None:
        chain = self.chain_of(request)
        extents = table.settle()
        index = len(extents)
        while index and extents[index - 1].stop > low:
            index -= 1
        while index < len(extents) and extents[index].start < high:
            extent = extents[index]
            parts = [extent]
            if extent.node is None:
                # Whole now, so what ended inside it no longer needs a name of its own.
                self.map.unmark(extent)
                parts = self._enter_between(request, chain, extent, low, high)
                table.replace(index, parts)
            index += len(parts)

    def _enter_between(self, request: Request, chain: Chain, extent: Extent, low: int, high: int) -> list[Extent]:
        """Register the blocks of ``extent`` that lie between ``low`` and ``high``; returns its parts in order."""
        cuts = self._cuts(request, extent, low, high)
        parts: list[Extent] = []
        for start, stop in pairwise(cuts):
            part = extent if stop == cuts[-1] else extent.split_front(stop - start)
            if start < low or stop > high:
                parts.append(part)
                continue
            if request.retention:
                part.priority, part.expires = request.priority_at(start * self.block_size)
            parts += self.map.enter(chain, part)
        return parts

    def _cuts(self, request: Request, extent: Extent, low: int, high: int) -> list[int]:
        """Where ``extent`` must be split: at ``low`` and ``high``, and where the wished priority changes."""
        cuts = {extent.start, extent.stop, *(at for at in (low, high) if extent.start < at < extent.stop)}
        for wish in request.retention:
            for token in (wish.start, wish.stop):
                at = -(-token // self.block_size) if token is not None else extent.stop
                if extent.start < at < extent.stop:
                    cuts.add(at)
        return sorted(cuts)

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
        chain = self.chain_of(request)
        extents = table.settle()
        for extent in extents:
            if extent.node is not None and extent.node.chain is chain:
                self.map.detach(extent, chain)
        self.pool.release(extents)

    def begin_step(self) -> None:
        """A scheduler step begins."""


class CrossGroup(Group):
    """Cross attention: blocks for the encoder's tokens, taken once, never cached and never shared."""

    restless = True

    def required(self, demand: Demand) -> int:
        return -(-demand.encoder // self.block_size)

    def adopt(self, table: Table, hit: GroupHit, local: int, external: int) -> None:
        """Nothing of the prompt concerns this group."""

    def take_external(self, table: Table, total: int, external: int) -> None:
        """Nothing of the prompt concerns this group."""
