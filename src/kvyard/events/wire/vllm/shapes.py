"""The shapes of vLLM's and SGLang's events on the wire, as types that msgspec reads and writes at C speed.

Two encodings of the same fields: maps with names (vLLM 0.24 and later, newer SGLang, TensorRT-LLM's streaming sink) and
positional arrays with the tag in front (vLLM up to 0.23, SGLang). Field order is the wire's. What is read may lack every
field that can be done without; what is written has every field that vLLM requires. Nothing here decides what a value means.
"""

from __future__ import annotations

from typing import Any, Generic, TypeAlias, TypeVar

from msgspec import Struct

T = TypeVar("T")
"""A token id; or, asked only where that fails, also the pair of ids that SGLang sends under EAGLE."""

Hash: TypeAlias = int | bytes
Extras: TypeAlias = list[tuple[Any, ...] | None]
Pair: TypeAlias = int | tuple[int, int]

STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
KNOWN = frozenset((STORED, REMOVED, CLEARED))


class MapStored(Struct, Generic[T], tag=STORED, kw_only=True, gc=False):
    """A map with names, read."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None = None
    token_ids: list[T]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Extras | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class MapRemoved(Struct, tag=REMOVED, kw_only=True, omit_defaults=True, gc=False):
    """Read and written; what we write always has a medium."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None
    reason: str | None = None
    """Ours; others skip it."""


class MapCleared(Struct, tag=CLEARED, kw_only=True, omit_defaults=True, gc=False):
    """Read and written. No engine gives it a payload, and whatever comes along must not spoil it."""

    medium: Any = None
    """Ours; others skip it and clear everything."""


class ArrayStored(Struct, Generic[T], tag=STORED, array_like=True, gc=False):
    """A positional array, read and written."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[T]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | dict[str, Any] | None = None
    """SGLang puts a map of metadata here."""
    extra_keys: Extras | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class ArrayRemoved(Struct, tag=REMOVED, array_like=True, gc=False):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class ArrayCleared(Struct, tag=CLEARED, array_like=True, gc=False):
    medium: Any = None


class WrittenStored(Struct, tag=STORED, kw_only=True, omit_defaults=True, gc=False):
    """A map with names, written: vLLM refuses one without the first seven, null or not."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: Extras | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class WrittenArrayCleared(Struct, tag=CLEARED, array_like=True, gc=False):
    pass


class VllmBatch(Struct, Generic[T], array_like=True, gc=False):
    """Any batch: two elements are enough, more are skipped."""

    ts: float
    events: list[T]
    rank: int | None = None


MapEvent: TypeAlias = MapStored[int] | MapRemoved | MapCleared
ArrayEvent: TypeAlias = ArrayStored[int] | ArrayRemoved | ArrayCleared
LooseMapEvent: TypeAlias = MapStored[Pair] | MapRemoved | MapCleared
LooseArrayEvent: TypeAlias = ArrayStored[Pair] | ArrayRemoved | ArrayCleared
AnyEvent: TypeAlias = MapEvent | ArrayEvent | LooseMapEvent | LooseArrayEvent
