"""The events of kvyard's block manager as vLLM's own objects, for vLLM's publisher to send."""

from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash, to_event_extra_keys

from kvyard.blocks.group import Group
from kvyard.events.types import Tier
from kvyard.hashing import Chain, Key
from kvyard.lab.conform.recorder import VllmRecorder


class EngineEvents(VllmRecorder):
    """A sink whose ``take`` returns what vLLM's own block pool would have queued."""

    def __init__(self, metadata: Sequence[tuple[str, int | None]]) -> None:
        """``metadata`` is the kind and the window of every group, as events name them."""
        super().__init__()
        self._metadata = metadata
        self.owner: Any = None
        """The vLLM request whose blocks are being registered."""

    def wire(self, key: Key) -> Key:
        converted: Key = maybe_convert_block_hash(key)
        return converted

    def removed(self, key: Key, group: int) -> None:
        self.events.append(BlockRemoved(block_hashes=[self.wire(key)], medium=MEDIUM_GPU, group_idx=group))

    def cleared(self, tier: Tier | None = None) -> None:
        self.events.append(AllBlocksCleared())

    def store(self, group: Group, chain: Chain, positions: Sequence[int], first: int, last: int) -> None:
        request, size = self.owner, chain.block_size
        lora = request.lora_request
        kind, window = self._metadata[group.index]
        self.events.append(
            BlockStored(
                block_hashes=[self.wire(chain.keys[position]) for position in positions],
                parent_block_hash=self.wire(chain.keys[first - 1]) if first else None,
                token_ids=request.all_token_ids[first * size : last * size],
                block_size=size,
                lora_id=lora.adapter_id if lora else None,
                medium=MEDIUM_GPU,
                lora_name=lora.name if lora else None,
                extra_keys=to_event_extra_keys(_extra_keys(request, positions, size)),
                group_idx=group.index,
                session_id=request.session_id,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=window,
            )
        )


def _extra_keys(request: Any, positions: Sequence[int], size: int) -> list[Any]:
    """Return the extra keys of each block, as vLLM computes them."""
    if not (request.lora_request or request.mm_features or request.cache_salt or request.prompt_embeds is not None):
        return [None] * len(positions)
    keys, media = [], 0
    for position in positions:
        key, media = generate_block_hash_extra_keys(request, position * size, (position + 1) * size, media)
        keys.append(key)
    return keys
