"""The parts of vLLM's manager that others reach through it: its block pool and its coordinator, as far as they are asked for.

What isn't here fails by name, at once, instead of working on something that isn't there.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kvyard.blocks import BlockManager, Request
from kvyard.blocks.extent import Extent
from kvyard.blocks.group import NO_HIT, Demand
from kvyard.blocks.table import BlockTable


class DetachedBlocks:
    """Blocks of an ended request, kept until the step that still writes to them is over."""

    def __init__(self, tables: list[BlockTable]) -> None:
        self.tables = tables


class CopyEnd:
    """One end of a block copy, kept until the step that runs the copy is over."""

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        self.block_id: int = extent.ids[0]

    @property
    def ref_cnt(self) -> int:
        """Holders of the block, this one included."""
        return self.extent.refs


class FreeLine:
    """In the place of vLLM's ``FreeKVCacheBlockQueue``, for tools that look at it."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks

    @property
    def num_free_blocks(self) -> int:
        return self._blocks.pool.free

    def get_all_free_blocks(self) -> list[Any]:
        """Return the free blocks, next to be handed out first. Takes time by their number."""
        return [KVCacheBlock(block_id) for block_id in self._blocks.pool.line()]


class PoolFacade:
    """In the place of vLLM's ``BlockPool``."""

    def __init__(self, blocks: BlockManager, caching: bool, hash_block_size: int, with_events: bool) -> None:
        self._blocks = blocks
        self.num_gpu_blocks = blocks.pool.num_blocks
        self.enable_caching = caching
        self.hash_block_size = hash_block_size
        self.enable_kv_cache_events = with_events
        self.null_block = KVCacheBlock(0, is_null=True)
        self.free_block_queue = FreeLine(blocks)

    def get_num_free_blocks(self) -> int:
        """Return the number of blocks that can be taken."""
        return self._blocks.pool.free

    def get_usage(self) -> float:
        """Return the share of blocks in use, 0 to 1."""
        return self._blocks.usage

    def free_blocks(self, ordered_blocks: Iterable[DetachedBlocks | CopyEnd]) -> None:
        """Give back what ``pop_blocks_for_free`` and ``take_kv_cache_block_copies`` returned."""
        ends: list[Extent] = []
        for block in ordered_blocks:
            if isinstance(block, CopyEnd):
                ends.append(block.extent)
            else:
                self._blocks.pool.holds.end_all(block.tables)
        self._blocks.pool.holds.end_copies(ends)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Unregister these blocks."""
        self._blocks.evict(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Evict everything cached, if no request holds a block; returns true if it did."""
        return self._blocks.reset()


class GroupFacade:
    """In the place of one of vLLM's ``SingleTypeKVCacheManager``s: what a group is, and nothing it does."""

    def __init__(self, group_id: int, spec: Any) -> None:
        self.kv_cache_group_id = group_id
        self.kv_cache_spec = spec
        self.block_size: int = spec.block_size


class CoordinatorFacade:
    """In the place of vLLM's ``KVCacheCoordinator``."""

    def __init__(self, blocks: BlockManager, kv_cache_config: Any) -> None:
        self._blocks = blocks
        self.enable_partial_hash_hits = blocks.geometry.fine_hits
        self.scheduler_block_size = blocks.geometry.scheduler_block_size
        self.hash_block_size = blocks.geometry.hash_block_size
        self.group_block_sizes = tuple(group.block_size for group in blocks.groups)
        self.single_type_managers = tuple(
            GroupFacade(index, group.kv_cache_spec) for index, group in enumerate(kv_cache_config.kv_cache_groups)
        )

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: tuple[Sequence[Any], ...],
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Return the number of free blocks needed for slots of ``num_tokens`` tokens.

        For requests that hold blocks; ``new_computed_blocks`` must be empty. Raises ``ValueError`` otherwise.
        """
        if any(new_computed_blocks):
            raise ValueError(f"request {request_id}: hits are counted when it is let in, not here")
        request: Request | None = self._blocks.requests.get(request_id)
        demand = Demand(
            num_tokens,
            num_tokens_main_model,
            num_local_computed_tokens,
            total_computed_tokens,
            num_encoder_tokens,
            apply_admission_cap,
        )
        groups = self._blocks.groups
        if request is None:
            return sum(group.required(demand) for group in groups)
        return self._blocks.coordinator.need(request, [NO_HIT] * len(groups), demand)
