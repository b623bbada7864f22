"""The encoder: batches out, in the words of vLLM (maps or arrays) or TensorRT-LLM (dicts).

The default is vLLM's current form, byte for byte what its own encoder writes for the same content. What vLLM has no field
for, such as the reason of a removal, goes along under a name that others skip.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvyard.errors import KvyardError
from kvyard.events.types import EventBatch, GroupMeta, Removed, Stored
from kvyard.events.wire.keys import write_hash, write_hashes
from kvyard.events.wire.media import NAMES
from kvyard.events.wire.shapes import (
    ArrayCleared,
    ArrayRemoved,
    ArrayStored,
    Batch,
    MapCleared,
    WrittenArrayCleared,
    WrittenRemoved,
    WrittenStored,
)
from kvyard.events.wire.trtllm_writing import TrtllmWriter

WRITTEN_DIALECTS = ("vllm", "vllm-array", "trtllm")

_pack = msgspec.msgpack.Encoder().encode


class Encoder:
    """Writes the batches of one stream. ``trtllm`` remembers what it wrote; the others don't."""

    def __init__(self, dialect: str = "vllm", *, integers: bool = True, groups: Sequence[GroupMeta] = ()) -> None:
        """``integers`` writes digests as vLLM does by default, as their last 64 bits; without it they go out whole.

        ``groups`` is for ``trtllm``, which begins with a ``created`` per group and always writes digests whole. Raises
        ``KvyardError`` for an unknown dialect.
        """
        if dialect not in WRITTEN_DIALECTS:
            raise KvyardError(f"unknown dialect {dialect!r}: choose one of {', '.join(WRITTEN_DIALECTS)}")
        self.dialect = dialect
        self._integers = integers
        self._array = dialect == "vllm-array"
        self._trtllm = TrtllmWriter(groups) if dialect == "trtllm" else None

    def encode(self, batch: EventBatch) -> bytes:
        """``batch`` as one payload. Stream, sequence and epoch aren't in it: they travel beside it."""
        if self._trtllm is not None:
            return self._trtllm.encode(batch)
        shape = self._array_shape if self._array else self._map_shape
        return _pack(Batch(batch.ts, [shape(event) for event in batch.events], batch.rank))

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
            return WrittenRemoved(
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


def encode(batch: EventBatch, dialect: str = "vllm") -> bytes:
    """Write one batch by itself; for a stream, and above all for ``trtllm``, keep an ``Encoder``.

    Raises ``KvyardError`` for an unknown dialect.
    """
    return Encoder(dialect).encode(batch)
