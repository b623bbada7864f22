"""Batches out, as vLLM writes them: maps or arrays.

Maps are byte for byte what vLLM's own encoder writes for the same content. What vLLM has no field for, such as the reason of
a removal, goes along under a name that others skip.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvyard.events.types import EventBatch, Removed, Stored
from kvyard.events.wire.keys import write_hash, write_hashes
from kvyard.events.wire.media import NAMES
from kvyard.events.wire.vllm.shapes import (
    ArrayCleared,
    ArrayRemoved,
    ArrayStored,
    MapCleared,
    MapRemoved,
    VllmBatch,
    WrittenArrayCleared,
    WrittenStored,
)

_pack = msgspec.msgpack.Encoder().encode


class VllmWriter:
    """Writes batches; remembers nothing."""

    def __init__(self, integers: bool, arrays: bool = False) -> None:
        """``integers`` writes digests as vLLM does by default, as their last 64 bits; without it they go out whole."""
        self._integers = integers
        self._shape = self._array_shape if arrays else self._map_shape

    def encode(self, batch: EventBatch) -> bytes:
        return _pack(VllmBatch(batch.ts, [self._shape(event) for event in batch.events], batch.rank))

    def _map_shape(self, event: Any) -> Any:
        if isinstance(event, Stored):
            return WrittenStored(
                block_hashes=write_hashes(event.hashes, self._integers),
                parent_block_hash=write_hash(event.parent, self._integers),
                token_ids=list(event.tokens or ()),
                block_size=event.block_size,
                lora_id=event.lora_id,
                medium=NAMES[event.tier],
                lora_name=event.lora_name,
                extra_keys=event.extra_keys,
                group_idx=event.group,
                kv_cache_spec_kind=event.kind,
                kv_cache_spec_sliding_window=event.window,
                locality=event.locality,
                ownership=event.ownership,
                session_id=event.session_id,
            )
        if isinstance(event, Removed):
            return MapRemoved(
                block_hashes=write_hashes(event.hashes, self._integers),
                medium=NAMES[event.tier],
                group_idx=event.group,
                locality=event.locality,
                ownership=event.ownership,
                reason=event.reason,
            )
        return MapCleared(medium=None if event.tier is None else NAMES[event.tier])

    def _array_shape(self, event: Any) -> Any:
        if isinstance(event, Stored):
            return ArrayStored(
                write_hashes(event.hashes, self._integers),
                write_hash(event.parent, self._integers),
                list(event.tokens or ()),
                event.block_size,
                event.lora_id,
                NAMES[event.tier],
                event.lora_name,
                event.extra_keys,
                event.group,
                event.kind,
                event.window,
            )
        if isinstance(event, Removed):
            return ArrayRemoved(write_hashes(event.hashes, self._integers), NAMES[event.tier], event.group)
        return WrittenArrayCleared() if event.tier is None else ArrayCleared(NAMES[event.tier])
