"""Operators of a pass on one rank, as sizes: matrix products, attention, experts, collectives, and the small kernels
between.

Made from a model's config and how it is split over cards. It knows shapes and bytes, and nothing of how fast anything is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvyard.engine.models.fields import Fields
from kvyard.engine.models.layers import conv_width, kv_heads, mamba_width, mixers
from kvyard.engine.models.planning import find_precision
from kvyard.engine.models.split import Parallelism, check_split
from kvyard.engine.models.weights import cache_element, find_weight_dtype, mlp_shape, weight_bits
from kvyard.integers import ceil_div

ACTIVATION = 2
"""Bytes of an activation: engines keep them in 16 bits between products."""


class Product(msgspec.Struct, frozen=True):
    """``count`` matrix products of (tokens x k) with (k x n) weights of ``weight`` bytes each."""

    n: int
    k: int
    weight: float
    count: int


class AttentionShape(msgspec.Struct, frozen=True, kw_only=True):
    """``count`` layers that attend alike. ``window`` tokens at most are seen; 0 for all."""

    count: int
    token_bytes: int
    """Bytes of cache that one token of context takes in one layer."""
    prompt_flops: int
    """Operations per pair of tokens in a prompt."""
    decode_flops: int
    """Operations per token of context in a decode step."""
    width: int = 128
    """Width of a head."""
    cache_bytes: int = 2
    """Bytes of a number in the cache."""
    latent: bool = False
    """True for MLA."""
    window: int = 0


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """``count`` layers of experts."""

    count: int
    experts: int
    """Experts on this rank."""
    per_token: float
    """Pairs of token and expert that reach this rank, per token of a pass."""
    chance: float
    """The chance that a token of this pass, or of another data rank's, calls a given expert."""
    tokens: int
    """Number of data ranks whose tokens come here."""
    expert_bytes: float
    """Weights of one expert on this rank."""
    pair_flops: int
    pair_bytes: int
    """Activations that a pair moves."""
    holders: int
    """Ranks over which whole experts are spread."""


class Operators(msgspec.Struct, frozen=True, kw_only=True):
    """One pass on one rank."""

    layers: int
    products: tuple[Product, ...]
    attention: tuple[AttentionShape, ...]
    experts: tuple[Experts, ...]
    states: int
    """Bytes of recurrent state read and written per sequence, over all layers."""
    head: Product
    """The output layer, by sequences instead of tokens."""
    small_kernels: int
    """Kernels that only move activations, over all layers."""
    small_bytes: int
    """Bytes that those move per token, over all layers."""
    collectives: int
    """Collectives over tensor ranks."""
    collective_bytes: int
    """Bytes per token of each."""
    exchanges: int
    """Exchanges of tokens between expert ranks: there and back, over all layers."""
    hops: int
    """Hand-overs between pipeline stages."""
    dtype: str
    """Stored type of matrices: a name of ``WEIGHT_BITS``."""
    expert_dtype: str
    """Stored type of experts."""
    ranks: int
    """Tensor ranks."""
    data_ranks: int
    """Ranks with requests of their own, which share the experts."""


def make_operators(
    config: Mapping[str, Any],
    split: Parallelism,
    *,
    weight_dtype: str | None = None,
    kv_cache_dtype: str = "auto",
) -> Operators:
    """Return the operators of the model in ``config`` (a Hugging Face config.json), split as ``split`` says.

    ``weight_dtype`` (a name of ``WEIGHT_BITS``) stands in for what the checkpoint says. Raises ``KvyardError`` for a model that
    lacks fields or can't be split so.
    """
    fields = Fields(config)
    check_split(fields, split)
    return _Counter(fields, split, weight_dtype, kv_cache_dtype).count()


def weight_types(fields: Fields, weight_dtype: str | None = None) -> tuple[str, str]:
    """Return the stored types of matrices and experts, names of ``WEIGHT_BITS``: ``weight_dtype``, or the checkpoint's own."""
    if weight_dtype is not None:
        name = find_weight_dtype(weight_dtype)
        return ("bf16" if name == "mxfp4" else name), name
    quantised = fields.outer.get("quantization_config") or fields.get("quantization_config")
    if not isinstance(quantised, Mapping):
        return "bf16", "bf16"
    quantization = (
        f"{quantised.get('quant_method', '')} {quantised.get('quant_algo', '')} {quantised.get('format', '')}".lower()
    )
    if "mxfp4" in quantization:
        return "bf16", "mxfp4"
    if "fp4" in quantization:
        return "fp4", "fp4"
    if "fp8" in quantization or "float-quantized" in quantization:
        return "fp8", "fp8"
    linear, _ = weight_bits(fields)
    name = "int4" if linear < 8 else "int8" if linear == 8 else "bf16"
    return name, name


class _Counter:
    """Walks over a model's layers."""

    def __init__(self, fields: Fields, split: Parallelism, weight_dtype: str | None, kv_cache_dtype: str) -> None:
        self._fields = fields
        self._split = split
        self._ranks = split.tensor_parallel_size
        self._cache = cache_element(fields, kv_cache_dtype)
        self._state = find_precision(fields, kv_cache_dtype).ssm
        linear, routed = weight_bits(fields, weight_dtype)
        self._dtype, self._expert_dtype = weight_types(fields, weight_dtype)
        self._linear, self._routed = linear / 8, routed / 8
        self._hidden = fields.integer("hidden_size")
        self._products: dict[tuple[int, int], int] = {}
        self._attention: dict[AttentionShape, int] = {}
        self._experts: dict[Experts, int] = {}
        self._states = self._kernels = self._moved = self._collectives = self._exchanges = 0

    def count(self) -> Operators:
        fields, split = self._fields, self._split
        kinds = mixers(fields)
        for index, kind in enumerate(kinds):
            self._mixer(kind)
            self._mlp(index, kind)
        vocabulary = fields.integer("vocab_size")
        head = Product(ceil_div(vocabulary, self._ranks), self._hidden, float(ACTIVATION), 1)
        return Operators(
            layers=len(kinds),
            products=tuple(Product(n, k, self._linear, count) for (n, k), count in self._products.items()),
            attention=tuple(msgspec.structs.replace(shape, count=count) for shape, count in self._attention.items()),
            experts=tuple(msgspec.structs.replace(shape, count=count) for shape, count in self._experts.items()),
            states=self._states,
            head=head,
            small_kernels=self._kernels,
            small_bytes=self._moved,
            collectives=self._collectives if self._ranks > 1 else 0,
            collective_bytes=self._hidden * ACTIVATION,
            exchanges=self._exchanges if split.data_parallel_size > 1 else 0,
            hops=split.pipeline_parallel_size - 1,
            dtype=self._dtype,
            expert_dtype=self._expert_dtype,
            ranks=self._ranks,
            data_ranks=split.data_parallel_size,
        )

    # -- parts of a layer -------------------------------------------------------------------------------------------

    def _product(self, n: int, k: int) -> None:
        self._products[n, k] = self._products.get((n, k), 0) + 1

    def _small(self, bytes_per_token: int) -> None:
        self._kernels += 1
        self._moved += bytes_per_token

    def _attends(self, shape: AttentionShape) -> None:
        self._attention[shape] = self._attention.get(shape, 0) + 1

    def _mixer(self, kind: str) -> None:
        if kind == "none":
            return
        fields, hidden, ranks = self._fields, self._hidden, self._ranks
        self._collectives += 1
        self._small(4 * hidden * ACTIVATION)  # norm with residual: two in, two out
        if kind == "mla":
            self._mla()
            return
        if kind in ("mamba", "mamba1", "both", "delta"):
            self._recurrent(kind)
        if kind in ("full", "window", "chunk", "both"):
            heads, (keys, width) = fields.integer("num_attention_heads"), kv_heads(fields, everywhere=kind == "full")
            mine, stored = heads // ranks, max(1, keys // ranks)
            gate = 2 if fields.get("attn_output_gate") or fields.model_type.startswith(("qwen3_next", "qwen3_5")) else 1
            self._product((mine * gate + 2 * stored) * width, hidden)
            self._product(hidden, mine * width)
            self._small(2 * (mine + stored) * width * ACTIVATION)  # rotation
            self._small(2 * 2 * stored * width * ACTIVATION)  # keys and values into the cache
            window = {"window": "sliding_window", "chunk": "attention_chunk_size"}.get(kind)
            self._attends(
                AttentionShape(
                    count=0,
                    token_bytes=2 * stored * width * self._cache,
                    prompt_flops=4 * mine * width,
                    decode_flops=4 * mine * width,
                    width=width,
                    cache_bytes=self._cache,
                    window=fields.integer(window) if window else 0,
                )
            )

    def _mla(self) -> None:
        fields, hidden, ranks = self._fields, self._hidden, self._ranks
        heads = fields.integer("num_attention_heads")
        mine = heads // ranks
        plain, turned = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
        value, rank = fields.integer("v_head_dim"), fields.integer("kv_lora_rank")
        queries = fields.integer("q_lora_rank", 0)
        if queries:
            self._product(queries + rank + turned, hidden)  # both down-projections at once, on every rank
            self._product(mine * (plain + turned), queries)
        else:
            self._product(mine * (plain + turned), hidden)
            self._product(rank + turned, hidden)
        self._product(mine * (plain + value), rank)
        self._product(hidden, mine * value)
        self._small(2 * mine * turned * ACTIVATION)
        self._small(2 * (rank + turned) * ACTIVATION)
        self._attends(
            AttentionShape(
                count=0,
                token_bytes=(rank + turned) * self._cache,
                prompt_flops=2 * mine * (plain + turned + value),
                decode_flops=2 * mine * (2 * rank + turned),
                width=value,
                cache_bytes=self._cache,
                window=fields.integer("index_topk", 0),
                latent=True,
            )
        )
        if fields.get("index_topk") is not None:
            self._indexer(queries)

    def _indexer(self, queries: int) -> None:
        """Add the indexer, which finds the tokens that sparse attention reads: it reads all of them, on every rank."""
        fields, hidden = self._fields, self._hidden
        heads, width = fields.integer("index_n_heads"), fields.integer("index_head_dim")
        self._product(heads * width, queries)
        self._product(width + heads, hidden)
        self._small(2 * (heads + 1) * width * ACTIVATION)
        flops = 2 * heads * width
        self._attends(
            AttentionShape(
                count=0,
                token_bytes=width + width // 128 * 4,
                prompt_flops=flops,
                decode_flops=flops,
                width=width,
                cache_bytes=1,
            )
        )

    def _recurrent(self, kind: str) -> None:
        fields, hidden, ranks = self._fields, self._hidden, self._ranks
        if kind == "delta":
            keys = fields.integer("linear_num_key_heads") * fields.integer("linear_key_head_dim")
            heads = fields.integer("linear_num_value_heads")
            values = heads * fields.integer("linear_value_head_dim")
            self._product((2 * keys + 2 * values + 2 * heads) // ranks, hidden)
            self._product(hidden, values // ranks)
            self._states += 2 * values * fields.integer("linear_key_head_dim") * self._state // ranks
        else:
            width, state = mamba_width(fields), fields.integer("mamba_state")
            inner = 2 * width if kind == "mamba1" else width + conv_width(fields, ranks) + width // 64
            self._product(inner // ranks, hidden)
            self._product(hidden, width // ranks)
            self._states += 2 * width * state * self._state // ranks
        self._small(4 * hidden * ACTIVATION)
        self._small(4 * hidden * ACTIVATION)

    def _mlp(self, index: int, kind: str) -> None:
        fields, hidden, ranks = self._fields, self._hidden, self._ranks
        mlp = mlp_shape(fields, index, kind)
        if mlp is None:
            return
        matrices = mlp.matrices
        self._collectives += 1
        self._small(4 * hidden * ACTIVATION)
        if mlp.dense:
            inner = ceil_div(mlp.dense, ranks)
            self._product((matrices - 1) * inner, hidden)
            self._product(hidden, inner)
            self._small(matrices * inner * ACTIVATION)
        if not mlp.experts:
            return
        experts, inner, chosen = mlp.experts, mlp.expert_width, mlp.chosen
        self._product(experts, hidden)  # which experts
        seen = mlp.latent or hidden
        if mlp.latent:
            self._product(mlp.latent, hidden)
            self._product(hidden, mlp.latent)
        split = self._split
        mine, slice_ = split.experts_of(experts, inner)
        sources = split.data_parallel_size
        self._exchanges += 2
        mixture = Experts(
            count=0,
            experts=mine,
            per_token=chosen * sources * mine / experts,
            chance=chosen / experts,
            tokens=sources,
            expert_bytes=matrices * seen * slice_ * self._routed,
            pair_flops=2 * matrices * seen * slice_,
            pair_bytes=2 * ACTIVATION * (seen + slice_),
            holders=max(1, experts // mine),
        )
        self._experts[mixture] = self._experts.get(mixture, 0) + 1
