"""Lists of blocks in the form that vLLM hands around: ids for the model runner, block objects for connectors that ask.

vLLM's ``KVCacheBlocks`` holds an object per block. These hold ids, which is all that most steps need, and make objects when
asked for them.
"""

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id

from kvyard.blocks import BlockManager, Hit, Request


class BlockIds(KVCacheBlocks):
    """Blocks by id, one list per group, with nothing known of what they cache."""

    def __init__(self, ids: Sequence[Sequence[int]]) -> None:
        self._ids = ids

    @property
    def blocks(self) -> tuple[list[Any], ...]:
        """vLLM's objects, made for this call: changing them changes nothing."""
        return tuple([_block(block_id) for block_id in ids] for ids in self._ids)

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """Return the ids per group; ``None`` with ``allow_none`` if there are none."""
        chosen = self._ids if group_ids is None else [self._ids[group] for group in group_ids]
        if allow_none and not any(chosen):
            return None
        return tuple([list(ids) for ids in chosen])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({[list(ids) for ids in self._ids]})"


class HitBlocks(BlockIds):
    """Result of a lookup: passed back to the manager when the request is admitted."""

    def __init__(self, manager: BlockManager, hit: Hit) -> None:
        super().__init__(hit.block_ids())
        self._groups = manager.groups
        self.hit = hit

    @property
    def blocks(self) -> tuple[list[Any], ...]:
        """vLLM's objects, made for this call; each that ends with a whole block has its hash, but for the null block."""
        listed = []
        for group, ids in zip(self._groups, self._ids, strict=True):
            keys = group.chain_of(self.hit.request).keys
            named = [keys[index] if block_id and index < len(keys) else None for index, block_id in enumerate(ids)]
            listed.append([_block(block_id, key, group.index) for block_id, key in zip(ids, named, strict=True)])
        return tuple(listed)


class HeldBlocks(BlockIds):
    """The blocks that a request holds."""

    def __init__(self, manager: BlockManager, request: Request) -> None:
        super().__init__(manager.block_ids(request))
        self._manager = manager
        self._request = request

    @property
    def blocks(self) -> tuple[list[Any], ...]:
        """vLLM's objects, made for this call, each with the hash it can be found by, if there is one."""
        listed = []
        for group, table, ids in zip(self._manager.groups, self._request.tables, self._ids, strict=False):
            block_list = [_block(block_id) for block_id in ids]
            keys = group.chain_of(self._request).keys
            for extent in table:
                if extent.node is not None:
                    for index in range(extent.start, min(extent.stop, len(block_list))):
                        block_list[index] = _block(ids[index], keys[index], group.index)
                elif extent.marks is not None:
                    block_list[extent.start] = _block(extent.ids[0], extent.marks.runs[0][0], group.index)
            listed.append(block_list)
        return tuple(listed) or tuple([] for _ in self._ids)


def _block(block_id: int, key: Any = None, group: int = 0) -> Any:
    block = KVCacheBlock(block_id, ref_cnt=1, is_null=not block_id)
    if key is not None:
        block.set_block_hash(make_block_hash_with_group_id(key, group))
    return block
