"""The shapes of TensorRT-LLM's event dicts, read and written, as types for msgspec.

Every event is an envelope (id, window, rank, group) around one of four payloads. Tokens are objects of their own, which
makes this the most talkative wire of all. The inner objects carry a ``type`` that isn't needed to read them. What the values
mean is in ``reader`` and ``writer``.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from msgspec import Struct

Hash: TypeAlias = int | str
"""A 64-bit integer, or the hex digits of a SHA-256."""

DEFAULT_PRIORITY = 35


class Token(Struct, kw_only=True, gc=False):
    type: str = "unique_token"
    token_id: int
    token_extra_id: int | None = 0


class MediaKey(Struct, kw_only=True, gc=False):
    type: str = "mm_key"
    hash: str
    """The content's hash; in older versions the user's own name for it, if there is one."""
    start_offset: int = 0
    """How far into the item this block starts."""
    uuid: str | None = None


class Block(Struct, kw_only=True, gc=False):
    type: str = "stored_block"
    block_hash: Hash
    tokens: list[Token | int] | None = None
    cache_level: int | None = 0
    priority: int | None = DEFAULT_PRIORITY
    mm_keys: list[MediaKey] | None = None
    cache_salt: str | None = None


class Created(Struct, tag="created", gc=False):
    num_blocks_per_cache_level: Any = None


class StoredData(Struct, tag="stored", gc=False):
    parent_hash: Hash | None = None
    blocks: list[Block] = []


class RemovedData(Struct, tag="removed", gc=False):
    block_hashes: list[Hash]


class Diff(Struct, kw_only=True, gc=False):
    type: str = "event_diff"
    new_value: int
    old_value: int


class Updated(Struct, tag="updated", kw_only=True, gc=False):
    block_hash: Hash
    cache_level: Diff | None = None
    priority: Any = None


Payload: TypeAlias = Created | StoredData | RemovedData | Updated
KNOWN = frozenset(("created", "stored", "removed", "updated"))


class Envelope(Struct, omit_defaults=True, gc=False):
    event_id: int | None
    data: Payload
    window_size: int | None = None
    hash_algo: str | None = None
    attention_dp_rank: int | None = None
    layer_group_id: int | None = None
