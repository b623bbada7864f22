"""kvyard's manager as vLLM's tests look at it: views in vLLM's words of what kvyard's block manager holds.

vLLM's tests look into the parts of its manager: reference counts and hashes of blocks, the map of cached blocks, tables of
groups. kvyard keeps these in another form. Everything here is read from kvyard's own state when a test asks, and what a test
does to a part (take, cache or evict a block) is done by kvyard's pool and map; nothing of vLLM's manager runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import vllm.v1.core.kv_cache_manager
import vllm.v1.core.sched.async_scheduler
import vllm.v1.core.sched.scheduler
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.core.single_type_kv_cache_manager import CrossAttentionManager

import kvyard.vllm.block_lists
import kvyard.vllm.scheduler
from kvyard.blocks import BlockManager, Request
from kvyard.blocks.extent import Extent
from kvyard.blocks.fine import mark_of
from kvyard.hashing import TokenChain
from kvyard.vllm.block_lists import BlockIds
from kvyard.vllm.counterpart import EngineHashes
from kvyard.vllm.facades import CoordinatorFacade, CopyEnd, DetachedBlocks, FreeLine, GroupFacade, PoolFacade
from kvyard.vllm.manager import Manager


class BlockView:
    """One block, as a ``KVCacheBlock``."""

    def __init__(self, pool: PoolView, block_id: int) -> None:
        self._pool = pool
        self.block_id = block_id
        self.is_null = block_id == 0

    @property
    def ref_cnt(self) -> int:
        return self._pool.references(self.block_id)

    @property
    def next_free_block(self) -> Any:
        return self._pool.free_block_queue.neighbour(self, 1)

    @property
    def prev_free_block(self) -> Any:
        return self._pool.free_block_queue.neighbour(self, -1)

    @property
    def block_hash(self) -> Any:
        return next((key for key, block_id in self._pool.cached() if block_id == self.block_id), None)

    @property
    def block_hash_num_tokens(self) -> int | None:
        return self._pool.hashed_tokens(self.block_id)

    def __repr__(self) -> str:
        return f"BlockView({self.block_id}, ref_cnt={self.ref_cnt}, block_hash={self.block_hash!r})"


class CacheEntries(dict[Any, Any]):
    """The cached blocks by hash when it was made; to take an entry out evicts its blocks, to put it back registers them."""

    def __init__(self, pool: PoolView, entries: dict[Any, Any]) -> None:
        super().__init__(entries)
        self._pool = pool

    def __copy__(self) -> dict[Any, Any]:
        return dict(self)

    def pop(self, key: Any, *default: Any) -> Any:
        found = super().pop(key, *default)
        for block in found.values() if isinstance(found, dict) else [found]:
            self._pool.uncache(key, block.block_id)
        return found

    def __setitem__(self, key: Any, block: Any) -> None:
        super().__setitem__(key, block)
        self._pool.cache_again(key)


class CachedView(Mapping[Any, Any]):
    """The cached blocks by hash, as a ``BlockHashToBlockMap``."""

    def __init__(self, pool: PoolView) -> None:
        self._pool = pool

    @property
    def _cache(self) -> dict[Any, Any]:
        holders: dict[Any, dict[int, BlockView]] = {}
        for key, block_id in self._pool.cached():
            holders.setdefault(key, {})[block_id] = self._pool.blocks[block_id]
        found = {key: next(iter(of.values())) if len(of) == 1 else of for key, of in holders.items()}
        return CacheEntries(self._pool, found)

    def pop(self, key: Any, block_id: int) -> BlockView | None:
        if (key, block_id) not in self._pool.cached():
            return None
        self._pool.uncache(key, block_id)
        return self._pool.blocks[block_id]

    def get_one_block(self, key: Any) -> BlockView | None:
        return next((self._pool.blocks[block_id] for each, block_id in self._pool.cached() if each == key), None)

    def __getitem__(self, key: Any) -> Any:
        return self._cache[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._cache)

    def __len__(self) -> int:
        return len(self._cache)


class FreeView(FreeLine):
    """The free blocks, as a ``FreeKVCacheBlockQueue``."""

    def __init__(self, blocks: BlockManager, pool: PoolView) -> None:
        super().__init__(blocks)
        self._pool = pool

    def get_all_free_blocks(self) -> list[Any]:
        return [self._pool.blocks[block_id] for block_id in self._blocks.pool.line()]

    def neighbour(self, block: BlockView, step: int) -> Any:
        """The block before or after ``block`` in the line, if that is free."""
        free = self.get_all_free_blocks()
        if block not in free:
            return None
        at = free.index(block) + step
        return free[at] if 0 <= at < len(free) else self._pool.ends[step > 0]

    @property
    def _ends(self) -> tuple[Any, Any]:
        head, tail = self._pool.ends
        free = self.get_all_free_blocks()
        head.next_free_block, tail.prev_free_block = (free[0], free[-1]) if free else (tail, head)
        return head, tail

    @property
    def fake_free_list_head(self) -> Any:
        return self._ends[0]

    @property
    def fake_free_list_tail(self) -> Any:
        return self._ends[1]


class PoolView(PoolFacade):
    """The pool, as a ``BlockPool``."""

    def __init__(self, manager: Manager, hash_block_size: int) -> None:
        super().__init__(manager.blocks, manager.enable_caching, hash_block_size, manager.enable_kv_cache_events)
        self._manager = manager
        self.blocks = [BlockView(self, block_id) for block_id in range(self.num_gpu_blocks)]
        self.null_block = self.blocks[0]
        self.ends = SimpleNamespace(), SimpleNamespace()
        self.free_block_queue = FreeView(manager.blocks, self)
        self.cached_block_hash_to_block = CachedView(self)
        self._taken: dict[int, Extent] = {}
        """Blocks that a test took, by id."""
        self._uncached: dict[Any, tuple[int, Any, Extent]] = {}
        """Blocks that a test evicted, by hash: group, chain and extent."""

    @property
    def kv_event_queue(self) -> list[Any]:
        return self._manager._events.events if self._manager._events is not None else []

    def cached(self) -> Iterator[tuple[Any, int]]:
        """Cached blocks by hash, the first holder of each first."""
        for group, key, block_id in self._blocks.pool.cached_blocks():
            yield make_block_hash_with_group_id(key, group), block_id

    def references(self, block_id: int) -> int:
        """Holders of a block."""
        if block_id in self._taken:
            return self._taken[block_id].refs
        held = [extent for r in self._blocks.requests.values() for t in r.tables for extent in t]
        held += self._blocks.pool.pinned
        extent = next((extent for extent in held if block_id in extent.ids), None) or self._blocks.pool._find(block_id)
        return extent.refs if extent is not None else 0

    def hashed_tokens(self, block_id: int) -> int | None:
        """Tokens that the hash of a block covers, from the start of its text."""
        for cache_map in self._blocks.pool.maps:
            size = self._blocks.groups[cache_map.group].block_size
            for node in cache_map.nodes():
                for extent in node.copies:
                    if block_id in extent.ids:
                        return (node.start + extent.ids.index(block_id) + 1) * size
            for holders in cache_map.marks.values():
                for extent in holders:
                    if block_id in extent.ids and extent.marks is not None:
                        return extent.marks.runs[0].stop * self.hash_block_size
        return None

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: Sequence[int]) -> list[BlockView] | None:
        keys = [make_block_hash_with_group_id(block_hash, group) for group in kv_cache_group_ids]
        found = [self.cached_block_hash_to_block.get_one_block(key) for key in keys]
        return None if None in found else found  # type: ignore[return-value]

    def get_new_blocks(self, num_blocks: int) -> list[BlockView]:
        taken = self._blocks.pool.take(num_blocks)
        self._taken |= {block_id: Extent([block_id], 0) for block_id in taken}
        return [self.blocks[block_id] for block_id in taken]

    def free_blocks(self, ordered_blocks: Iterable[Any], prepend: bool = False) -> None:
        for block in ordered_blocks:
            if isinstance(block, DetachedBlocks | CopyEnd):
                super().free_blocks([block])
            else:
                self._blocks.pool.release([self._taken.pop(block.block_id)])

    def cache_full_blocks(
        self,
        request: Any,
        blocks: list[Any],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        **_: Any,
    ) -> None:
        manager = self._manager
        group, ours = manager.blocks.groups[kv_cache_group_id], manager._follow(request).update(False)
        if manager._events is not None:
            manager._events.owner = request
        if group.watch is not None:
            group.watch(ours, group, num_cached_blocks, num_full_blocks)
        for at in range(num_cached_blocks, num_full_blocks):
            extent = self._taken[blocks[at].block_id]
            extent.start = at
            group.map.enter(group.chain_of(ours), extent)

    def cache_partial_block(
        self, request: Any, block: Any, num_tokens: int, kv_cache_group_id: int, block_size: int, **_: Any
    ) -> Any:
        manager = self._manager
        group, ours = manager.blocks.groups[kv_cache_group_id], manager._follow(request).update(False)
        if manager._events is not None:
            manager._events.owner = request
        extent, run = self._taken[block.block_id], mark_of(ours, num_tokens, group.hash_block_size)
        extent.start = (num_tokens - 1) // block_size
        group.map.mark(extent, run)
        return make_block_hash_with_group_id(run[0], kv_cache_group_id)

    def uncache(self, key: Any, block_id: int) -> None:
        """Evict a block that a test takes out of the map of cached blocks."""
        pool = self._blocks.pool
        extent = pool._find(block_id)
        assert extent is not None
        extent = pool.isolate(extent, extent.ids.index(block_id))
        if extent.node is not None:
            self._uncached[key] = extent.node.group, extent.node.chain, extent
        pool.unname(extent)

    def cache_again(self, key: Any) -> None:
        """Register the block of ``key`` again, which a test evicted."""
        group, chain, extent = self._uncached.pop(key)
        self._blocks.pool.maps[group].enter(chain, extent)

    def queue_copy(self, group: int, source: BlockView, target: BlockView) -> None:
        """Have a block that a test took copied to another."""
        pair = self._taken.pop(source.block_id), self._taken.pop(target.block_id)
        self._blocks.groups[group].copies.append(pair)
        self._blocks.pool.pinned.update(pair)


class TableView(Sequence[Any]):
    """A request's block table in one group, as it is whenever it is looked at, and as it was last once the request is gone."""

    def __init__(self, manager: Manager, request_id: str, group: int) -> None:
        self._manager = manager
        self._request_id = request_id
        self._group = group
        self._latest: list[Any] = []
        self._list()

    def _list(self) -> list[Any]:
        request = self._manager.blocks.requests.get(self._request_id)
        if request is not None:
            views = self._manager.block_pool.blocks
            self._latest = [views[block_id] for block_id in self._manager.blocks.block_ids(request)[self._group]]
        return self._latest

    def __getitem__(self, at: Any) -> Any:
        return self._list()[at]

    def __len__(self) -> int:
        return len(self._list())

    def __eq__(self, other: object) -> bool:
        return self._list() == list(other) if isinstance(other, Iterable) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._list())


class TablesView(Mapping[str, Any]):
    """The block tables of one group by request."""

    def __init__(self, manager: Manager, group: int) -> None:
        self._manager = manager
        self._group = group

    def __getitem__(self, request_id: str) -> Any:
        return TableView(self._manager, request_id, self._group)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._manager.blocks.requests

    def __iter__(self) -> Iterator[str]:
        return iter(self._manager.blocks.requests)

    def __len__(self) -> int:
        return len(self._manager.blocks.requests)


class CountsView(TablesView):
    """How many blocks of each request's table have been registered in one group."""

    def __getitem__(self, request_id: str) -> Any:
        return self._manager.blocks.requests[request_id].tables[self._group].registered


class CheckpointsView(TablesView):
    """Where this step writes a state besides its last one: tokens and position by request."""

    def __getitem__(self, request_id: str) -> Any:
        found = self._checkpoint(request_id)
        if found is None:
            raise KeyError(request_id)
        return found

    def __contains__(self, request_id: object) -> bool:
        return self._checkpoint(str(request_id)) is not None

    def __iter__(self) -> Iterator[str]:
        return (request_id for request_id in self._manager.blocks.requests if request_id in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _checkpoint(self, request_id: str) -> Any:
        request = self._manager.blocks.requests.get(request_id)
        state = None if request is None else request.tables[self._group].state
        return getattr(state, "checkpoint", None)


class CopiesView(list[Any]):
    """Copies that a test has made in one group."""

    def __init__(self, manager: Manager, group: int) -> None:
        self._manager = manager
        self._group = group

    def append(self, pair: Any) -> None:
        self._manager.block_pool.queue_copy(self._group, *pair)


class GroupView(GroupFacade):
    """One group, as a ``SingleTypeKVCacheManager``."""

    def __init__(self, manager: Manager, facade: GroupFacade) -> None:
        self.__dict__ |= facade.__dict__
        group = manager.blocks.groups[facade.kv_cache_group_id]
        self.block_size = group.block_size
        self.block_pool = manager.block_pool
        self._null_block = manager.block_pool.null_block
        self.dcp_world_size = group.block_size // facade.kv_cache_spec.block_size
        self.req_to_blocks = TablesView(manager, facade.kv_cache_group_id)
        self.num_cached_block = CountsView(manager, facade.kv_cache_group_id)
        self._checkpoints = CheckpointsView(manager, facade.kv_cache_group_id)
        self._pending_cow_copies = CopiesView(manager, facade.kv_cache_group_id)
        geometry = manager.blocks.geometry
        self.cache_hit_alignment_tokens = (
            geometry.hash_block_size if geometry.fine_hits else geometry.scheduler_block_size
        )


class CrossView(GroupView):
    """A group of cross-attention."""


class CoordinatorView(CoordinatorFacade):
    """The coordinator, as a ``KVCacheCoordinator``."""

    def __init__(self, manager: Manager) -> None:
        super().__init__(manager.blocks, manager.kv_cache_config)
        self.block_pool = manager.block_pool
        self._caching = manager.enable_caching
        self.single_type_managers = tuple(
            (CrossView if self._blocks.groups[at].spec.kind == "cross" else GroupView)(manager, facade)
            for at, facade in enumerate(self.single_type_managers)
        )

    def find_longest_cache_hit_per_group(
        self, block_hashes: Sequence[Any], max_cache_hit_length: int
    ) -> tuple[Any, tuple[int, ...]]:
        # A test may make its manager before it makes that hash.
        root = kv_cache_utils.NONE_HASH if self._caching else b""
        chain = TokenChain([0] * (max_cache_hit_length + 1), self.hash_block_size, EngineHashes(block_hashes, root))
        hits, lengths = self._blocks.coordinator.lookup_each(Request("a test's", chain))
        views = self.block_pool.blocks
        return tuple([views[block_id] for block_id in hit.ids()] for hit in hits), tuple(lengths)

    @property
    def _cache_hit_alignment_tokens(self) -> int:
        geometry = self._blocks.geometry
        return geometry.hash_block_size if geometry.fine_hits else geometry.scheduler_block_size

    @property
    def retention_interval(self) -> int | None:
        return self._blocks.coordinator.retention

    @retention_interval.setter
    def retention_interval(self, interval: int | None) -> None:
        self._blocks.coordinator.keep_every(interval)


class InspectedManager(Manager):
    """kvyard's manager with views for its parts."""

    made: ClassVar[int] = 0
    """Managers constructed in this process."""
    acting: ClassVar[InspectedManager | None] = None
    """The manager that was called last: lists of blocks made meanwhile are its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        InspectedManager.made += 1
        self.block_pool = PoolView(self, self._hash_block_size)
        self.coordinator = CoordinatorView(self)

    def __getattribute__(self, name: str) -> Any:
        if name in ("get_blocks", "get_computed_blocks", "allocate_slots", "truncate_computed_blocks"):
            InspectedManager.acting = self
        return super().__getattribute__(name)


def _note_manager(self: BlockIds, ids: Sequence[Sequence[int]]) -> None:
    self._ids = ids
    self._manager_view = InspectedManager.acting  # type: ignore[attr-defined]


def _views(self: Any) -> tuple[list[Any], ...]:
    views = self._manager_view.block_pool.blocks
    return tuple([views[block_id] for block_id in ids] for ids in self._ids)


def install() -> None:
    """Put kvyard's classes in the place of vLLM's. Test modules must not be imported yet."""
    BlockIds.__init__ = _note_manager  # type: ignore[method-assign]
    for kind in (BlockIds, kvyard.vllm.block_lists.HitBlocks, kvyard.vllm.block_lists.HeldBlocks):
        kind.blocks = property(_views)  # type: ignore[assignment]
    kvyard.vllm.scheduler.Manager = InspectedManager  # type: ignore[misc]
    vllm.v1.core.kv_cache_manager.KVCacheManager = InspectedManager
    # Tests of models with several groups ask for the class before they look at hits.
    HybridKVCacheCoordinator.register(CoordinatorView)
    CrossAttentionManager.register(CrossView)
    vllm.v1.core.sched.scheduler.Scheduler = kvyard.vllm.scheduler.KvyardScheduler
    vllm.v1.core.sched.async_scheduler.AsyncScheduler = kvyard.vllm.scheduler.KvyardAsyncScheduler
