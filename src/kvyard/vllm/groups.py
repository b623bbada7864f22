"""vLLM's groups of layers as kvyard's, and a refusal of those that kvyard's block manager doesn't have."""

from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupRole,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvyard.blocks import GroupSpec
from kvyard.vllm.version import UnsupportedError


def group_specs(kv_cache_config: Any, dcp_world_size: int = 1) -> list[GroupSpec]:
    """Return kvyard's specification of every group of ``kv_cache_config``. Raises ``UnsupportedError``, naming the group.

    With decode context parallelism each rank has a part of a block's tokens: a block has ``dcp_world_size`` times as many.
    """
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise UnsupportedError("kvyard.vllm.Scheduler needs a model with a KV cache; this one has none")
    return [_group_spec(f"group {number}", group, dcp_world_size) for number, group in enumerate(groups)]


def _group_spec(where: str, group: Any, dcp_world_size: int) -> GroupSpec:
    if group.role != KVCacheGroupRole.DEFAULT:
        raise UnsupportedError(f"{where} has the role {group.role.value}, which kvyard's block manager doesn't have")
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        inner = list(spec.kv_cache_specs.values())
        if len({(type(each), each.block_size, getattr(each, "sliding_window", None)) for each in inner}) > 1:
            raise UnsupportedError(f"{where} mixes kinds of attention, which kvyard's block manager has no rule for")
        spec = inner[0]
    size, eagle = spec.block_size, group.is_eagle_group
    if dcp_world_size > 1 and spec.dcp_sharded:
        size *= dcp_world_size
    # Exact types: what is derived from one of these has rules of its own.
    kind = type(spec)
    if kind is FullAttentionSpec:
        return GroupSpec(kind="full", block_size=size, eagle=eagle)
    if kind is MLAAttentionSpec:
        return GroupSpec(kind="mla", block_size=size, eagle=eagle)
    if kind in (SlidingWindowSpec, SlidingWindowMLASpec) and not spec.extra_retained_tokens:
        name = "sliding_window" if kind is SlidingWindowSpec else "sliding_window_mla"
        cached = spec.prefix_cacheable
        return GroupSpec(kind=name, block_size=size, window=spec.sliding_window, cached=cached, eagle=eagle)
    if kind is ChunkedLocalAttentionSpec:
        return GroupSpec(kind="chunked_local", block_size=size, chunk=spec.attention_chunk_size, eagle=eagle)
    if kind is MambaSpec:
        mode, spare = spec.mamba_cache_mode, spec.num_speculative_blocks
        inside = mode == "align" and spec.num_prefill_checkpoint_blocks > 0
        unit = spec.prefill_checkpoint_alignment if inside else None
        return GroupSpec(kind="mamba", block_size=size, mode=mode, spec_blocks=spare, checkpoint_unit=unit, eagle=eagle)
    if kind is CircularBufferSpec:
        return GroupSpec(kind="ring", block_size=size, eagle=eagle)
    if kind is CrossAttentionSpec:
        return GroupSpec(kind="cross", block_size=size, eagle=eagle)
    raise UnsupportedError(
        f"{where} is a {kind.__name__} with settings that kvyard's block manager has no rule for: {spec}"
    )
