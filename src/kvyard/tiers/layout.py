"""Mapping of a manager's blocks onto the pages of lower tiers: sizes, chains, and a page's blocks on the device.

A page is ``blocks_per_chunk`` consecutive blocks of one group. All groups share one block size in bytes, as they share the
device's pool. Positions count pages here, blocks in the manager, and tokens where the two meet.
"""

import math
from collections.abc import Iterable

import msgspec

from kvyard.blocks import BlockManager, Hit, Request
from kvyard.blocks.agreement import Agreement
from kvyard.blocks.extent import Extent
from kvyard.blocks.group import NO_HIT, Demand
from kvyard.blocks.spans import Spans
from kvyard.blocks.spec import ConfigError
from kvyard.blocks.table import BlockTable
from kvyard.hashing import Chain
from kvyard.integers import ceil_div
from kvyard.tiers.contract import Contract
from kvyard.tiers.store import PageRange


class PageLayout:
    """The geometry between one manager and its lower tiers."""

    def __init__(self, manager: BlockManager, blocks_per_chunk: int, block_bytes: int) -> None:
        """``block_bytes`` is the size of a device block, all its layers together. Raises ``ConfigError`` for groups that
        can't be offloaded.
        """
        specs = tuple(group.spec for group in manager.groups)
        if not manager.caching:
            raise ConfigError("lower tiers hold what the prefix cache names: switch caching on, or leave the tiers out")
        if type(block_bytes) is not int or block_bytes < 1:
            raise ConfigError(f"block_bytes must be a whole number of 1 or more, got {block_bytes!r}")
        if blocks_per_chunk > 1 and any(spec.is_state for spec in specs):
            raise ConfigError(
                "states are kept one by one and never fill a chunk: leave out blocks_per_chunk for mamba groups"
            )
        self.manager = manager
        self.pool = manager.pool
        self.chunk = blocks_per_chunk
        self.block_sizes = tuple(spec.block_size for spec in specs)
        self.page_tokens = tuple(size * blocks_per_chunk for size in self.block_sizes)
        self.block_bytes = block_bytes
        self.num_groups = len(specs)
        self.alignment = math.lcm(manager.geometry.scheduler_block_size, *self.page_tokens)
        if len(specs) == 1:
            self.alignment = self.page_tokens[0]
        self.agreement = Agreement(
            [msgspec.structs.replace(spec, block_size=size) for spec, size in zip(specs, self.page_tokens)],
            [group.eagle for group in manager.groups],
            self.alignment,
        )
        self.contract = Contract(specs, manager.geometry.hash_block_size, block_bytes, blocks_per_chunk)

    def pages(self, num_blocks: int) -> int:
        """Return the number of pages that fit into ``num_blocks`` blocks. Raises ``ConfigError`` if none does."""
        if num_blocks < self.chunk:
            raise ConfigError(f"a tier of {num_blocks} blocks doesn't hold a single chunk of {self.chunk}")
        return num_blocks // self.chunk

    def chain(self, request: Request, group: int) -> Chain:
        """Return the request's chain, a hash per page of ``group``."""
        return request.view(self.page_tokens[group])

    def named(self, request: Request, group: int, first: int) -> list[Extent]:
        """Return the registered extents of the request on the device that reach beyond page ``first``."""
        extents = request.tables[group].settle()
        index, before = len(extents), first * self.chunk
        while index and extents[index - 1].stop > before:
            index -= 1
        return [extent for extent in extents[index:] if extent.node is not None]

    def pages_of(self, extents: Iterable[Extent]) -> Spans:
        """Return the intervals of pages that ``extents``, in order of position, cover in whole."""
        spans: list[tuple[int, int]] = []
        for extent in extents:
            start = extent.start
            stop = start + len(extent.ids)
            if spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], stop)
            else:
                spans.append((start, stop))
        chunk = self.chunk
        if chunk == 1:
            return spans
        inner = [(ceil_div(low, chunk), high // chunk) for low, high in spans]
        return [(low, high) for low, high in inner if low < high]

    def hold_blocks(self, extents: Iterable[Extent], piece: PageRange) -> BlockTable:
        """Hold the device blocks behind ``piece``, out of ``extents``, for a transfer that reads them."""
        return self.pool.holds.pin(self.pool.cut(extents, piece.start * self.chunk, piece.stop * self.chunk))

    def demand(self, request: Request, hit: Hit | None, tokens: int, external: int = 0) -> int:
        """Return the number of blocks that an allocation takes from the head of the free list for ``external`` tokens to be
        loaded after ``hit`` and ``tokens`` after those. Adopted blocks are not taken.
        """
        local = request.num_computed_tokens + (hit.tokens if hit is not None else 0)
        slots = local + external + tokens
        demand = Demand(slots, slots, local, local + external)
        total = 0
        for index, group in enumerate(self.manager.groups):
            table = request.tables[index] if request.tables else BlockTable()
            group_hit = hit.groups[index] if hit is not None else NO_HIT
            total += max(0, group.uses(request, table, group_hit, demand) - group_hit.free_blocks(0))
        return total

    def hold_slots(self, request: Request, group: int, low: int, high: int) -> BlockTable:
        """Hold the request's blocks ``low`` to ``high`` of ``group``, named or not."""
        return self.pool.holds.pin(self.pool.cut(list(request.tables[group].settle()), low, high))
