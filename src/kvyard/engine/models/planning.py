"""An engine's memory plan from a model's config and a card's memory: groups, block sizes, number of blocks.

The rule is vLLM's: the card's share, less weights and activations, is cut into blocks. Weights are counted from the config and
activations estimated; callers may give both.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from kvyard.blocks.spec import GroupSpec
from kvyard.engine.models.fields import Fields
from kvyard.engine.models.grouping import LayerGroup, bytes_per_block, group_layers
from kvyard.engine.models.layers import Precision, cache_layers, mixers
from kvyard.engine.models.memory import NEWEST, find_release, tokens_in_flight
from kvyard.engine.models.memory import reserve as memory_beside_cache
from kvyard.engine.models.split import Parallelism, check_split
from kvyard.engine.models.weights import (
    DTYPE_BYTES,
    WEIGHT_DTYPES,
    cache_element,
    count_weights,
    dtype_bytes,
    weight_bytes,
)
from kvyard.errors import KvyardError
from kvyard.integers import ceil_div
from kvyard.settings import Setting, size
from kvyard.units import show_bytes


class ModelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Memory plan of a model on a card. Bytes are of one rank, of the pipeline stage with the fewest blocks."""

    architecture: str
    layer_groups: tuple[LayerGroup, ...]
    num_blocks: int
    """Blocks, including block 0, the null block, as vLLM counts them."""
    block_size: int
    """Tokens that the scheduler counts in: the common multiple of the groups' block sizes."""
    bytes_per_block: int
    bytes_per_token: int
    """Bytes of one more token of a long context (a window's or a state's cost is per request)."""
    bytes_per_request: int
    """Most bytes that a request holds in windows and states, on top of that."""
    parameters: int
    memory: int
    weights_bytes: int
    reserve_bytes: int
    cache_bytes: int
    stage: int
    """The pipeline stage that all this is of; the others have room for more blocks, and use as many."""
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
        """Groups for the block manager."""
        return tuple(group.spec for group in self.layer_groups)

    def engine_options(self) -> dict[str, Any]:
        """Return the fields of an engine's config that follow from this plan. An engine doesn't count vLLM's null block."""
        return {
            "num_gpu_blocks": self.num_blocks - 1,
            "groups": msgspec.to_builtins(self.groups),
            "bytes_per_block": self.bytes_per_block,
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "enable_prefix_caching": self.enable_prefix_caching,
        }


def weight_dtypes() -> list[str]:
    """Return names of what weights may be stored in."""
    return list(WEIGHT_DTYPES)


TensorParallel = Annotated[
    int, Setting("Tensor parallelism: cards that share every layer.", flag=True, also=("tp", "-tp"))
]
PipelineParallel = Annotated[
    int, Setting("Pipeline parallelism: stages that the layers are cut into.", flag=True, also=("pp", "-pp"))
]
ExpertParallel = Annotated[
    bool,
    Setting("Expert parallelism: each card has whole experts, not a slice of each.", flag=True, also=("ep", "-ep")),
]


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an engine. Names and defaults are vLLM's."""

    gpu_memory_utilization: Annotated[
        float | None,
        Setting("Share of the card's memory that the engine uses. [default: the vLLM release's, 0.92]", flag=True),
    ] = None
    tensor_parallel_size: TensorParallel = 1
    pipeline_parallel_size: PipelineParallel = 1
    data_parallel_size: Annotated[
        int,
        Setting(
            "Data parallelism: ranks with requests of their own that share the experts.", flag=True, also=("dp", "-dp")
        ),
    ] = 1
    enable_expert_parallel: ExpertParallel = False
    weight_dtype: Annotated[
        str | None,
        Setting("Type of the stored weights: {choices}. [default: the model's]", flag=True, choices=weight_dtypes),
    ] = None
    block_size: Annotated[int | None, Setting("Tokens per block. [default: 16, or 64 for MLA]", flag=True)] = None
    kv_cache_dtype: Annotated[
        str, Setting("Type of the KV cache: auto (the model's), bfloat16, fp8, ...", flag=True)
    ] = "auto"
    max_model_len: Annotated[
        int | None, Setting("Tokens of the longest request. [default: the model's]", flag=True)
    ] = None
    max_num_batched_tokens: Annotated[
        int, Setting("Tokens of the largest pass. [default: with --gpu vLLM's for the card, else 8192]", flag=True)
    ] = 8192
    max_num_seqs: Annotated[
        int, Setting("Requests of the largest pass. [default: with --gpu vLLM's for the card, else 256]", flag=True)
    ] = 256
    enable_prefix_caching: bool = True
    vllm_version: Annotated[str, Setting("The vLLM release whose memory use is computed.", flag=True)] = NEWEST
    weights: Annotated[
        int | None, Setting("Bytes of weights per card, instead of the computed ones.", flag=True, parse=size)
    ] = None
    reserve: Annotated[
        int | None, Setting("Bytes of activations per card, instead of an estimate.", flag=True, parse=size)
    ] = None

    def check(self) -> None:
        """Raise ``KvyardError`` for what can't be."""
        if not 0 < self.utilization <= 1:
            raise KvyardError(f"gpu_memory_utilization is a share above 0 and at most 1, got {self.utilization:g}")
        for name in ("block_size", "max_model_len", "max_num_batched_tokens", "max_num_seqs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise KvyardError(f"{name} must be at least 1, got {value}")

    @property
    def utilization(self) -> float:
        """Share of the card's memory that the engine may use."""
        given = self.gpu_memory_utilization
        return find_release(self.vllm_version).utilization if given is None else given

    @property
    def split(self) -> Parallelism:
        """Return the split of the model."""
        return Parallelism(**{name: getattr(self, name) for name in Parallelism.__struct_fields__})


class _StagePlan(NamedTuple):
    """Memory of one card of a pipeline stage, in bytes."""

    groups: list[LayerGroup]
    weights: int
    reserve: int
    cache: int
    """Bytes left for the cache."""

    @property
    def block(self) -> int:
        return bytes_per_block(self.groups)

    @property
    def blocks(self) -> int:
        return self.cache // self.block if self.block else UNLIMITED


UNLIMITED = 1 << 62
"""Blocks of a stage whose layers keep nothing."""
MOST_RANKS = 64
"""Up to here a number of cards that suffices is looked for."""


def plan(config: Mapping[str, Any], memory: int, **options: Any) -> ModelPlan:
    """Plan the memory of an engine for ``config`` (a Hugging Face config.json) on ranks with ``memory`` bytes each.

    ``options`` are those of ``PlanOptions``. Raises ``KvyardError`` for configs that lack fields, shapes that can't be split,
    and memory that doesn't suffice.
    """
    on = PlanOptions(**options)
    if memory < 1:
        raise KvyardError(f"gpu_memory must be above 0, got {memory}")
    on.check()
    fields = Fields(config)
    parameters = count_weights(fields).parameters
    check_split(fields, on.split)
    stages = _stages(fields, memory, on)
    number = min(range(len(stages)), key=lambda index: stages[index].blocks)
    tight, batched = stages[number], on.max_num_batched_tokens
    in_flight = tokens_in_flight(batched, on.pipeline_parallel_size, on.vllm_version)
    groups, page, blocks = tight.groups, tight.block, tight.blocks
    if blocks < 2:
        raise KvyardError(_too_large(fields, memory, on, tight))
    longest = on.max_model_len or fields.integer("max_position_embeddings")
    specs = [group.spec for group in groups]
    needs = [_blocks_per_request(spec, longest, in_flight) for spec in specs]
    full = [group for group in groups if group.spec.is_full] or [g for g in groups if not g.spec.is_state]
    kept = [need for group, need in zip(groups, needs, strict=True) if not group.spec.is_full]
    return ModelPlan(
        architecture=fields.architecture,
        layer_groups=tuple(groups),
        num_blocks=blocks,
        block_size=math.lcm(*(group.spec.block_size for group in groups)),
        bytes_per_block=page,
        bytes_per_token=sum(page // group.spec.block_size for group in full),
        bytes_per_request=sum(kept) * page,
        parameters=parameters,
        memory=memory,
        weights_bytes=tight.weights,
        reserve_bytes=tight.reserve,
        cache_bytes=tight.cache,
        stage=number,
        max_model_len=longest,
        longest=longest_request(specs, longest, in_flight, blocks - 1),
        max_tokens=tokens_that_fit(specs, longest, in_flight, blocks),
        max_concurrency=requests_that_fit(specs, longest, in_flight, blocks),
        max_num_batched_tokens=batched,
        max_num_seqs=on.max_num_seqs,
        enable_prefix_caching=on.enable_prefix_caching,
    )


def _stages(fields: Fields, memory: int, on: PlanOptions) -> list[_StagePlan]:
    split, caching = on.split, on.enable_prefix_caching
    longest = on.max_model_len or fields.integer("max_position_embeddings")
    layers = cache_layers(fields, find_precision(fields, on.kv_cache_dtype), on.tensor_parallel_size)
    least = on.block_size or (64 if any(layer.kind == "mla" for layer in layers) else 16)
    spans = split.stages(len(mixers(fields)))
    grouped = group_layers(
        layers,
        block_size=least,
        state_mode="align" if caching else "none",
        state_block=least if caching else longest,
        stages=spans,
    )
    stages = []
    for number, groups in enumerate(grouped):
        weights, reserve = on.weights, on.reserve
        if weights is None:
            weights = weight_bytes(fields, count_weights(fields, split, number), on.weight_dtype)
        if reserve is None:
            reserve = memory_beside_cache(
                fields,
                memory=memory,
                version=on.vllm_version,
                ranks=on.tensor_parallel_size,
                batched=on.max_num_batched_tokens,
                sequences=on.max_num_seqs,
                weight_dtype=on.weight_dtype,
                samples=number == len(grouped) - 1,
            )
        cache = int(memory * on.utilization) - weights - reserve
        stages.append(_StagePlan(groups, weights, reserve, cache))
    return stages


def _too_large(fields: Fields, memory: int, on: PlanOptions, tight: _StagePlan) -> str:
    """Return why there is no room for a cache, and how many cards would do."""
    usable = int(memory * on.utilization)
    needed = tight.weights + tight.reserve + 2 * tight.block
    more = _enough_ranks(fields, memory, on)
    advice = "use a larger card or smaller weights" if more is None else f"tensor_parallel_size {more} would do"
    return (
        f"{fields.architecture} doesn't fit: a card needs {show_bytes(needed)}, {show_bytes(tight.weights)} of them for weights"
        f" and {show_bytes(tight.reserve)} for activations, and has {show_bytes(usable)}"
        f" ({show_bytes(memory)} at gpu_memory_utilization {on.utilization:g}); {advice}"
    )


def _enough_ranks(fields: Fields, memory: int, on: PlanOptions) -> int | None:
    """Return the fewest tensor ranks on which there is room; ``None`` if none is known."""
    if on.weights is not None:
        return None  # the number per card was given, and doesn't follow from the ranks
    for ranks in range(on.tensor_parallel_size + 1, MOST_RANKS + 1):
        wider = msgspec.structs.replace(on, tensor_parallel_size=ranks)
        try:
            check_split(fields, wider.split)
            if min(stage.blocks for stage in _stages(fields, memory, wider)) >= 2:
                return ranks
        except KvyardError:
            continue
    return None


def find_precision(fields: Fields, kv_cache_dtype: str) -> Precision:
    """Return bytes of a number in the cache, and in states. Raises ``KvyardError`` for an unknown type."""
    model = dtype_bytes(str(fields.get("torch_dtype") or "bfloat16"))
    ssm = fields.get("mamba_ssm_cache_dtype") or fields.get("mamba_ssm_dtype")
    if ssm is None and fields.model_type == "nemotron_h":
        ssm = "float32"
    if kv_cache_dtype != "auto" and kv_cache_dtype not in DTYPE_BYTES:
        names = ", ".join(DTYPE_BYTES)
        raise KvyardError(f"unknown data type {kv_cache_dtype!r} of the cache; choose auto or one of {names}")
    return Precision(
        cache=cache_element(fields, kv_cache_dtype),
        state=model,
        ssm=model if ssm is None else dtype_bytes(str(ssm)),
    )


def _blocks_per_request(spec: GroupSpec, longest: int, in_flight: int) -> int:
    """Return blocks that a request of ``longest`` tokens holds in a group at most, while ``in_flight`` aren't settled."""
    if spec.is_state:
        return 2 if spec.mode == "align" else 1
    cap = spec.rule().cap(in_flight, longest)
    return ceil_div(longest, spec.block_size) if cap is None else cap


def tokens_that_fit(specs: Sequence[GroupSpec], longest: int, in_flight: int, blocks: int) -> int:
    """Return tokens of requests of ``longest`` tokens that fit into ``blocks``, the null block among them, as vLLM reports them
    ("GPU KV cache size"): windows and states of these requests take blocks, too.
    """
    return int(requests_that_fit(specs, longest, in_flight, blocks) * longest)


def requests_that_fit(specs: Sequence[GroupSpec], longest: int, in_flight: int, blocks: int) -> float:
    """Return requests of ``longest`` tokens that fit into ``blocks``, the null block among them ("Maximum concurrency")."""
    return blocks / sum(_blocks_per_request(spec, longest, in_flight) for spec in specs)


def longest_request(specs: Sequence[GroupSpec], most: int, in_flight: int, blocks: int) -> int:
    """Return the length of the longest request, up to ``most``, that ``blocks`` hold: its need never shrinks as it grows."""

    def needed(length: int) -> int:
        return sum(_blocks_per_request(spec, length, in_flight) for spec in specs)

    return bisect_right(range(1, most + 1), blocks, key=needed)
