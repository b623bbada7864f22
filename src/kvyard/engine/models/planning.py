"""From a model's config and a card's memory to what an engine is built with: groups, block sizes, and how many blocks.

The way is vLLM's: what is left of the card's share after weights and activations is cut into blocks. Weights are counted from
the config; activations are estimated, and both can be said instead.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvyard.blocks.spec import GroupSpec
from kvyard.engine.models.fields import Fields
from kvyard.engine.models.grouping import LayerGroup, bytes_per_block, group_layers
from kvyard.engine.models.layers import Precision, cache_layers
from kvyard.engine.models.weights import count_weights, dtype_bytes, weight_bytes
from kvyard.errors import KvyardError
from kvyard.units import show_bytes

CONTEXT_BYTES = 700 * 2**20
"""What the driver, the libraries and fragments take; with the estimate of activations it gives vLLM 0.19's blocks for an 8B
model on an RTX 4090 to a percent."""


class ModelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine needs of a model on a card. Bytes are of one rank."""

    architecture: str
    layer_groups: tuple[LayerGroup, ...]
    num_blocks: int
    """As vLLM counts them: block 0, the null block, included."""
    block_size: int
    """Tokens that the scheduler counts in: the common multiple of the groups' block sizes."""
    bytes_per_block: int
    bytes_per_token: int
    """What one more token of a long context takes for good (a window's or a state's cost is per request)."""
    bytes_per_request: int
    """What a request holds in windows and states at most, on top of that."""
    parameters: int
    memory: int
    weights_bytes: int
    reserve_bytes: int
    cache_bytes: int
    max_model_len: int
    longest: int
    """The longest request, up to ``max_model_len``, that fits alone."""
    max_tokens: int
    """Tokens of requests of ``max_model_len`` that fit."""
    max_concurrency: float
    """Requests of ``max_model_len`` that fit."""
    max_num_batched_tokens: int
    max_num_seqs: int
    enable_prefix_caching: bool

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """As the block manager takes them."""
        return tuple(group.spec for group in self.layer_groups)

    def engine_options(self) -> dict[str, Any]:
        """The fields of an engine's config that follow from this plan. An engine doesn't count vLLM's null block."""
        return {
            "num_gpu_blocks": self.num_blocks - 1,
            "groups": msgspec.to_builtins(self.groups),
            "bytes_per_block": self.bytes_per_block,
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "enable_prefix_caching": self.enable_prefix_caching,
        }


def plan(
    config: Mapping[str, Any],
    memory: int,
    *,
    gpu_memory_utilization: float = 0.92,
    tensor_parallel_size: int = 1,
    block_size: int | None = None,
    kv_cache_dtype: str = "auto",
    max_model_len: int | None = None,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
    enable_prefix_caching: bool = True,
    weights: int | None = None,
    reserve: int | None = None,
) -> ModelPlan:
    """What an engine gets for ``config`` (a Hugging Face config.json) on ranks with ``memory`` bytes each.

    Names and defaults are vLLM's. ``weights`` and ``reserve`` are bytes of one rank, to be used instead of estimates. Raises
    ``KvyardError`` for configs that lack fields, shapes that can't be split, and memory that doesn't suffice.
    """
    _check(memory, gpu_memory_utilization, tensor_parallel_size, block_size, max_num_batched_tokens)
    fields = Fields(config)
    count = count_weights(fields)
    longest = max_model_len or fields.integer("max_position_embeddings")
    layers = cache_layers(fields, _precision(fields, kv_cache_dtype), tensor_parallel_size)
    least = block_size or (64 if any(layer.kind == "mla" for layer in layers) else 16)
    mode = "align" if enable_prefix_caching else "none"
    groups = group_layers(
        layers, block_size=least, state_mode=mode, state_block=least if enable_prefix_caching else longest
    )
    taken = -(-weight_bytes(fields, count) // tensor_parallel_size) if weights is None else weights
    if reserve is None:
        reserve = _reserve(fields, tensor_parallel_size, max_num_batched_tokens, max_num_seqs)
    cache = int(memory * gpu_memory_utilization) - taken - reserve
    size = bytes_per_block(groups)
    blocks = cache // size
    needs = [_blocks_per_request(group.spec, longest, max_num_batched_tokens) for group in groups]
    if blocks < 2:
        raise KvyardError(
            f"{show_bytes(memory)} at gpu_memory_utilization {gpu_memory_utilization:g} leave {show_bytes(max(0, cache))}"
            f" for the cache after {show_bytes(taken)} of weights and {show_bytes(reserve)} of activations;"
            " use a larger card, more tensor parallelism or smaller weights"
        )
    full = [group for group in groups if group.spec.is_full] or [g for g in groups if not g.spec.is_state]
    kept = [need for group, need in zip(groups, needs) if not group.spec.is_full]
    concurrency = blocks / sum(needs)
    return ModelPlan(
        architecture=fields.architecture,
        layer_groups=tuple(groups),
        num_blocks=blocks,
        block_size=math.lcm(*(group.spec.block_size for group in groups)),
        bytes_per_block=size,
        bytes_per_token=sum(size // group.spec.block_size for group in full),
        bytes_per_request=sum(kept) * size,
        parameters=count.parameters,
        memory=memory,
        weights_bytes=taken,
        reserve_bytes=reserve,
        cache_bytes=cache,
        max_model_len=longest,
        longest=_longest(groups, longest, max_num_batched_tokens, blocks - 1),
        max_tokens=int(concurrency * longest),
        max_concurrency=concurrency,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=enable_prefix_caching,
    )


def _precision(fields: Fields, kv_cache_dtype: str) -> Precision:
    model = dtype_bytes(str(fields.get("torch_dtype") or "bfloat16"))
    ssm = fields.get("mamba_ssm_cache_dtype") or fields.get("mamba_ssm_dtype")
    if ssm is None and fields.model_type == "nemotron_h":
        ssm = "float32"
    return Precision(
        cache=model if kv_cache_dtype == "auto" else dtype_bytes(kv_cache_dtype),
        state=model,
        ssm=model if ssm is None else dtype_bytes(str(ssm)),
    )


def _blocks_per_request(spec: GroupSpec, longest: int, batched: int) -> int:
    """Blocks that a request of ``longest`` tokens holds in a group at most, while a chunk of ``batched`` is computed."""
    if spec.is_state:
        return 2 if spec.mode == "align" else 1
    cap = spec.rule().cap(batched, longest)
    return -(-longest // spec.block_size) if cap is None else cap


def _longest(groups: Sequence[LayerGroup], most: int, batched: int, blocks: int) -> int:
    """The longest request that ``blocks`` hold: what it needs never shrinks as it grows."""

    def needed(length: int) -> int:
        return sum(_blocks_per_request(group.spec, length, batched) for group in groups)

    return bisect_right(range(1, most + 1), blocks, key=needed)


def _reserve(fields: Fields, ranks: int, batched: int, sequences: int) -> int:
    """Activations of the largest pass: the widest layer, the residual stream, and the logits with their float copies."""
    hidden = fields.integer("hidden_size")
    inner = fields.integer("intermediate_size", fields.integer("moe_intermediate_size", 4 * hidden))
    if fields.integer("num_experts", 0) and fields.get("moe_intermediate_size") is not None:
        inner = fields.integer("moe_intermediate_size") * fields.integer("num_experts_per_tok", 1)
    wide = batched * (2 * inner // ranks + 4 * hidden) * 2
    logits = sequences * fields.integer("vocab_size") * (2 + 4 + 4)
    return CONTEXT_BYTES + wide + logits


def _check(memory: int, share: float, ranks: int, block_size: int | None, batched: int) -> None:
    if memory < 1:
        raise KvyardError(f"gpu_memory must be above 0, got {memory}")
    if not 0 < share <= 1:
        raise KvyardError(f"gpu_memory_utilization is a share above 0 and at most 1, got {share:g}")
    if ranks < 1:
        raise KvyardError(f"tensor_parallel_size must be at least 1, got {ranks}")
    if block_size is not None and block_size < 1:
        raise KvyardError(f"block_size must be at least 1, got {block_size}")
    if batched < 1:
        raise KvyardError(f"max_num_batched_tokens must be at least 1, got {batched}")
