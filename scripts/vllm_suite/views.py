"""kvyard's manager as vLLM's tests look at it: read-only views in vLLM's words of what kvyard's block manager holds.

vLLM's tests look into the parts of its manager: reference counts and hashes of blocks, the map of cached blocks, tables of
groups. kvyard keeps these in another form. Everything here is read from kvyard's own state when a test asks; nothing is kept
beside it, and nothing of vLLM's manager runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import vllm.v1.core.kv_cache_manager
import vllm.v1.core.sched.async_scheduler
import vllm.v1.core.sched.scheduler
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

import kvyard.vllm.block_lists
import kvyard.vllm.scheduler
from kvyard.blocks import BlockManager
from kvyard.blocks.extent import Extent
from kvyard.vllm.block_lists import BlockIds
from kvyard.vllm.facades import CoordinatorFacade, DetachedBlocks, FreeLine, GroupFacade, PoolFacade
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
    def block_hash(self) -> Any:
        return next((key for key, block_id in self._pool.cached() if block_id == self.block_id), None)

    @property
    def block_hash_num_tokens(self) -> int | None:
        return self._pool.hashed_tokens(self.block_id)

    def __repr__(self) -> str:
        return f"BlockView({self.block_id}, ref_cnt={self.ref_cnt}, block_hash={self.block_hash!r})"


class CachedView(Mapping[Any, Any]):
    """The cached blocks by hash, as a ``BlockHashToBlockMap``."""

    def __init__(self, pool: PoolView) -> None:
        self._pool = pool

    @property
    def _cache(self) -> dict[Any, Any]:
        holders: dict[Any, dict[int, BlockView]] = {}
        for key, block_id in self._pool.cached():
            holders.setdefault(key, {})[block_id] = self._pool.blocks[block_id]
        return {key: next(iter(of.values())) if len(of) == 1 else of for key, of in holders.items()}

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
        self._taken: set[int] = set()

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
            return 1
        held: Iterable[Extent] = (extent for r in self._blocks.requests.values() for t in r.tables for extent in t)
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
        self._taken |= set(taken)
        return [self.blocks[block_id] for block_id in taken]

    def free_blocks(self, ordered_blocks: Iterable[Any], prepend: bool = False) -> None:
        for block in ordered_blocks:
            if isinstance(block, DetachedBlocks):
                super().free_blocks([block])
            else:
                self._taken.remove(block.block_id)
                self._blocks.pool.release([Extent([block.block_id], 0)])


class TablesView(Mapping[str, Any]):
    """The block tables of one group by request."""

    def __init__(self, manager: Manager, group: int) -> None:
        self._manager = manager
        self._group = group

    def __getitem__(self, request_id: str) -> list[Any]:
        request = self._manager.blocks.requests.get(request_id)
        if request is None:
            return []
        views = self._manager.block_pool.blocks
        return [views[block_id] for block_id in self._manager.blocks.block_ids(request)[self._group]]

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
        geometry = manager.blocks.geometry
        self.cache_hit_alignment_tokens = (
            geometry.hash_block_size if geometry.fine_hits else geometry.scheduler_block_size
        )


class CoordinatorView(CoordinatorFacade):
    """The coordinator, as a ``KVCacheCoordinator``."""

    def __init__(self, manager: Manager) -> None:
        super().__init__(manager.blocks, manager.kv_cache_config)
        self.block_pool = manager.block_pool
        self.single_type_managers = tuple(GroupView(manager, facade) for facade in self.single_type_managers)

    @property
    def _cache_hit_alignment_tokens(self) -> int:
        geometry = self._blocks.geometry
        return geometry.hash_block_size if geometry.fine_hits else geometry.scheduler_block_size

    @property
    def retention_interval(self) -> int | None:
        return self._blocks.coordinator.retention

    @retention_interval.setter
    def retention_interval(self, interval: int | None) -> None:
        self._blocks.coordinator.retention = interval


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
    vllm.v1.core.sched.scheduler.Scheduler = kvyard.vllm.scheduler.KvyardScheduler
    vllm.v1.core.sched.async_scheduler.AsyncScheduler = kvyard.vllm.scheduler.KvyardAsyncScheduler
