"""Number of parameters of a model and their bytes, estimated from its config.

Good to about a percent for the families below (the tests compare with published counts); for others, and for checkpoints
with unusual quantisation, give the bytes yourself. Vision towers and draft heads are left out.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from kvyard.engine.models.fields import Fields
from kvyard.engine.models.layers import conv_width, kv_heads, mamba_width, mixers
from kvyard.engine.models.split import WHOLE, Parallelism
from kvyard.errors import KvyardError, suggest
from kvyard.integers import ceil_div

DTYPE_BYTES: Mapping[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
WEIGHT_DTYPES: Mapping[str, tuple[str, ...]] = {
    "bf16": ("bfloat16", "fp16", "float16", "half"),
    "fp8": ("fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "float8_e5m2", "fbgemm_fp8", "w8a8_fp8"),
    "int8": ("w8a16", "gptq_int8"),
    "int4": ("w4a16", "awq", "gptq", "awq_marlin", "gptq_marlin", "gptq_int4"),
    "fp4": ("nvfp4", "modelopt_fp4"),
    "mxfp4": (),
}
"""Data types of stored weights, with other spellings."""
WEIGHT_BITS: Mapping[str, float] = {"bf16": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4.16, "fp4": 4.5, "mxfp4": 4.25}
"""Scales included: groups of 128 share 16 bits and a zero point (int4), of 16 a byte (fp4), of 32 a byte (mxfp4)."""
MXFP4_TILE = 256
"""Kernels for mxfp4 have matrices padded to multiples of this: gpt-oss's 2,880 become 3,072."""
FOUR_BIT = ("mxfp4", "nvfp4", "awq", "gptq", "awq_marlin", "gptq_marlin")
EMBEDDINGS_EVERYWHERE = (
    *("gemma2", "gemma3", "gemma4", "gpt_oss", "granitemoehybrid", "jamba", "mixtral", "nemotron_h"),
    *("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5"),
)
"""Prefixes of the model types of which every pipeline stage has the embeddings, as in vLLM."""
HEADS_EVERYWHERE = tuple(name for name in EMBEDDINGS_EVERYWHERE if name != "qwen3_5")
"""Model types of which every pipeline stage also has the output layer."""
NOT_GATED = ("nemotron_h", "gpt2", "opt", "falcon", "gpt_neox", "gpt_bigcode", "starcoder2", "phi")
"""Families whose MLPs have two matrices rather than three."""


class MlpShape(msgspec.Struct, frozen=True, kw_only=True):
    """The MLP of one layer: a dense one, experts, or both."""

    matrices: int
    dense: int = 0
    """The inner width of what every token goes through, shared experts included."""
    experts: int = 0
    expert_width: int = 0
    chosen: int = 0
    """Experts per token."""
    latent: int = 0
    """Width that tokens are projected to for the experts, and back; 0 if these work on the hidden size."""
    beside: bool = False
    """True if the dense MLP is the layer's own and experts are beside it, rather than shared experts."""


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters by how they are stored."""

    plain: int = 0
    """Embeddings, norms, biases: kept in the model's type."""
    linear: int = 0
    """Matrices of layers, which quantised checkpoints compress."""
    experts: int = 0
    """Matrices of experts, which some checkpoints compress alone."""

    @property
    def parameters(self) -> int:
        return self.plain + self.linear + self.experts


def dtype_bytes(name: str) -> int:
    """Return bytes of one element. Raises ``KvyardError`` for a type it doesn't know."""
    size = DTYPE_BYTES.get(name.removeprefix("torch."))
    if size is None:
        raise KvyardError(f"unknown data type {name!r}: {suggest(name, DTYPE_BYTES)}")
    return size


def _stores_8_bit_cache(fields: Fields) -> bool:
    """True if the checkpoint has scales of an 8-bit KV cache, which vLLM then uses by itself."""
    stored = fields.outer.get("quantization_config") or fields.get("quantization_config")
    scheme = stored.get("kv_cache_scheme") if isinstance(stored, Mapping) else None
    return (
        isinstance(scheme, Mapping)
        and str(stored.get("quant_method", "")).startswith("modelopt")
        and (scheme.get("dynamic"), scheme.get("num_bits"), scheme.get("type")) == (False, 8, "float")
    )


def cache_element(fields: Fields, kv_cache_dtype: str) -> int:
    """Return bytes of one element of the KV cache. Raises ``KvyardError`` for a type that isn't known."""
    if kv_cache_dtype != "auto":
        return dtype_bytes(kv_cache_dtype)
    return 1 if _stores_8_bit_cache(fields) else dtype_bytes(str(fields.get("torch_dtype") or "bfloat16"))


def count_weights(fields: Fields, split: Parallelism = WHOLE, stage: int = 0) -> Weights:
    """Return parameters of the language model, or those that one rank of a pipeline stage has.

    Tensor ranks share matrices and have copies of norms, of routers, of what MLA projects down, and of KV heads of which
    there are fewer than ranks. The first stage has the embeddings, the last the output layer, and both have them where they
    are the same; of some families every stage has them. Raises ``KvyardError`` naming the fields that are missing.
    """
    if fields.get("is_encoder_decoder"):
        raise KvyardError(f"{fields.architecture}: encoder-decoder models are not supported")
    listed = fields.get("hybrid_override_pattern") is not None or _types(fields) is not None
    fields.require(*(() if listed else ("num_hidden_layers",)), "hidden_size", "num_attention_heads", "vocab_size")
    hidden, ranks = fields.integer("hidden_size"), split.tensor_parallel_size
    vocabulary = ceil_div(fields.integer("vocab_size"), ranks) * hidden
    kinds = mixers(fields)
    last = stage == split.pipeline_parallel_size - 1
    embeds = stage == 0 or fields.model_type.startswith(EMBEDDINGS_EVERYWHERE)
    answers = last or fields.model_type.startswith(HEADS_EVERYWHERE)
    tied = bool(fields.get("tie_word_embeddings") or fields.model_type.startswith("gemma"))
    tables = int(embeds or answers) if tied else embeds + answers
    plain = vocabulary * tables + hidden * last
    linear = experts = 0
    shared = fields.integer("num_kv_shared_layers", 0)
    norms = 4 if fields.model_type.startswith(("gemma2", "gemma3", "gemma4")) else 2
    for index in split.stages(len(kinds))[stage]:
        alone, kind = _alone(fields), kinds[index]
        reads = index >= len(kinds) - shared
        linear += _mixer(fields, "full" if reads and not alone else kind, ranks)
        plain += hidden * (1 if alone else norms)
        mlp = mlp_shape(fields, index, kind)
        if mlp is not None:
            plain += 4 * hidden * mlp.beside  # their own norms, and the router's scale
            sharing = split.shared_expert_ranks if mlp.experts and not mlp.beside else ranks
            linear += hidden * mlp.experts + mlp.matrices * hidden * ceil_div(mlp.dense, sharing)
            mine, width = split.experts_of(mlp.experts, mlp.expert_width)
            if fields.model_type == "gpt_oss":
                linear += mine * (2 * width + hidden)
            linear += 2 * hidden * mlp.latent  # on every rank
            experts += mine * mlp.matrices * (mlp.latent or hidden) * width
    return Weights(plain=plain, linear=linear, experts=experts)


def weight_bytes(fields: Fields, of: Weights, dtype: str | None = None) -> int:
    """Return bytes of ``of`` in ``dtype``, a name of ``WEIGHT_BITS``, or as the checkpoint stores it
    (``quantization_config``).
    """
    plain = dtype_bytes(str(fields.get("torch_dtype") or "bfloat16"))
    linear, experts = weight_bits(fields, dtype)
    if experts == WEIGHT_BITS["mxfp4"]:
        hidden = fields.integer("hidden_size")
        experts *= ceil_div(hidden, MXFP4_TILE) * MXFP4_TILE / hidden
    return of.plain * plain + round((of.linear * linear + of.experts * experts) / 8)


def weight_bits(fields: Fields, dtype: str | None = None) -> tuple[float, float]:
    """Return bits of one weight of a layer's matrices and of the experts', scales included. Raises ``KvyardError`` for a
    ``dtype`` that isn't known.
    """
    plain = 8.0 * dtype_bytes(str(fields.get("torch_dtype") or "bfloat16"))
    if dtype is None:
        return stored_bits(fields.outer.get("quantization_config") or fields.get("quantization_config"), plain)
    name = find_weight_dtype(dtype)
    if name == "mxfp4" and not fields.integer("num_experts", 0):
        raise KvyardError(f"{fields.architecture} has no experts, and mxfp4 is for those alone: choose int4 or fp4")
    return (plain if name == "mxfp4" else WEIGHT_BITS[name]), WEIGHT_BITS[name]


def find_weight_dtype(name: str) -> str:
    """Return the name of ``WEIGHT_BITS`` that ``name``, as engines spell it, stands for. Raises ``KvyardError`` for an unknown
    one.
    """
    plain = name.strip().lower().replace("-", "_").removeprefix("torch.")
    for dtype, spellings in WEIGHT_DTYPES.items():
        if plain in (dtype, *spellings):
            return dtype
    raise KvyardError(
        f"unknown type of weights {name!r}: {suggest(name, WEIGHT_DTYPES)} (awq and gptq are int4, nvfp4 is fp4)"
    )


def stored_bits(quantisation: Mapping[str, Any] | None, plain: float) -> tuple[float, float]:
    """Return bits of one weight of a layer's matrices and of the experts', scales included."""
    if not isinstance(quantisation, Mapping):
        return plain, plain
    method = str(quantisation.get("quant_method", ""))
    if method == "mxfp4":
        return plain, 4.25
    if method in ("fp8", "fbgemm_fp8"):
        return 8.0, 8.0
    if method == "modelopt" and quantisation.get("quant_algo") == "NVFP4":
        kept = any("self_attn" in str(name) for name in quantisation.get("ignore") or ())
        return (plain if kept else WEIGHT_BITS["fp4"]), WEIGHT_BITS["fp4"]
    bits = quantisation.get("bits") or quantisation.get("w_bit") or _group_bits(quantisation)
    if bits is None and method in FOUR_BIT:
        bits = 4
    if not isinstance(bits, int):
        raise KvyardError(f"quantisation {method!r} is not known; say the size of the weights yourself (--weights)")
    # Groups of 128 share a scale and a zero point of 16 bits and of the weights' own.
    return bits + (0.16 if bits < 8 else 0.0), bits + (0.16 if bits < 8 else 0.0)


def _group_bits(quantisation: Mapping[str, Any]) -> int | None:
    """Return the bits of the first group of compressed-tensors."""
    groups = quantisation.get("config_groups")
    if isinstance(groups, Mapping):
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if isinstance(weights, Mapping) and isinstance(weights.get("num_bits"), int):
                return int(weights["num_bits"])
    return None


def _mixer(fields: Fields, kind: str, ranks: int) -> int:
    hidden = fields.integer("hidden_size")
    if kind == "none":
        return 0
    if kind == "mla":
        return _mla(fields, ranks)
    if kind == "delta":
        keys = fields.integer("linear_num_key_heads") * fields.integer("linear_key_head_dim")
        heads = fields.integer("linear_num_value_heads")
        values = heads * fields.integer("linear_value_head_dim")
        return (hidden * (2 * keys + 2 * values + 2 * heads) + values * hidden + 4 * (2 * keys + values)) // ranks
    total = 0
    if kind in ("mamba", "both"):
        width, heads = mamba_width(fields), fields.integer("mamba_heads", mamba_width(fields) // 64)
        wide = conv_width(fields, ranks)
        total += hidden * (width + wide + heads) + width * hidden
        total += wide * (fields.integer("mamba_conv", 4) + 1) + 3 * heads + width
        total //= ranks
    if kind == "mamba1":
        width, state = mamba_width(fields), fields.integer("mamba_state")
        rank = ceil_div(hidden, 16)
        total += (hidden * 3 * width + width * (rank + 2 * state) + rank * width + width * (state + 6)) // ranks
    if kind in ("full", "window", "chunk", "both"):
        heads, (keys, width) = fields.integer("num_attention_heads"), kv_heads(fields, everywhere=kind == "full")
        stored = max(1, keys // ranks)
        gate = 2 if fields.get("attn_output_gate") or fields.model_type.startswith(("qwen3_next", "qwen3_5")) else 1
        mine = heads // ranks
        total += hidden * width * (mine * gate + 2 * stored) + mine * width * hidden
        if fields.get("attention_bias"):
            total += width * (mine + 2 * stored) + hidden
    return total


def _mla(fields: Fields, ranks: int) -> int:
    hidden, mine = fields.integer("hidden_size"), fields.integer("num_attention_heads") // ranks
    plain, turned = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    value, rank = fields.integer("v_head_dim"), fields.integer("kv_lora_rank")
    queries = fields.integer("q_lora_rank", 0)
    width = mine * (plain + turned)
    total = hidden * queries + queries * width if queries else hidden * width
    if fields.get("index_topk") is not None:  # the indexer, on every rank
        heads, size = fields.integer("index_n_heads"), fields.integer("index_head_dim")
        total += queries * heads * size + hidden * (size + heads)
    return total + hidden * (rank + turned) + rank * mine * (plain + value) + mine * value * hidden


def _is_mixture(fields: Fields, index: int) -> bool:
    if not fields.integer("num_experts", 0) or index < fields.integer("first_k_dense_replace", 0):
        return False
    if index in (fields.get("mlp_only_layers") or []):
        return False
    moe_layers = fields.get("moe_layers")
    if isinstance(moe_layers, list):
        return index in moe_layers
    if fields.get("expert_layer_period") is not None:
        return index % fields.integer("expert_layer_period") == fields.integer("expert_layer_offset", 0)
    step = fields.integer("decoder_sparse_step", fields.integer("interleave_moe_layer_step", 1))
    return (index + 1) % max(1, step) == 0


def mlp_shape(fields: Fields, index: int, kind: str) -> MlpShape | None:
    """Return the MLP of layer ``index``, whose mixer is ``kind``; ``None`` where the layer has none."""
    hidden = fields.integer("hidden_size")
    pattern, types = fields.get("hybrid_override_pattern"), _types(fields)
    alone = _alone(fields)
    if alone and kind != "none":
        return None
    if isinstance(pattern, str):
        mixture = pattern[index] == "E"
    else:
        mixture = types[index] == "moe" if alone else _is_mixture(fields, index)
    matrices = 2 if fields.model_type in NOT_GATED else 3
    if not mixture:
        inner = fields.get("intermediate_size_mlp") or fields.integer("intermediate_size", 4 * hidden)
        return MlpShape(matrices=matrices, dense=int(inner))
    inner = fields.integer("moe_intermediate_size" if fields.get("moe_intermediate_size") else "intermediate_size")
    shared = fields.integer("shared_expert_intermediate_size", fields.integer("moe_shared_expert_intermediate_size", 0))
    shared = shared or fields.integer("n_shared_experts", 0) * inner
    if fields.model_type.startswith("llama4"):
        shared = inner
    beside = bool(fields.get("enable_moe_block"))
    if beside:
        shared = fields.integer("intermediate_size")
    return MlpShape(
        matrices=matrices,
        dense=shared,
        experts=fields.integer("num_experts"),
        expert_width=inner,
        chosen=fields.integer("num_experts_per_tok", 1),
        latent=fields.integer("moe_latent_size", 0),
        beside=beside,
    )


def _types(fields: Fields) -> Any:
    return fields.get("layers_block_type") or fields.get("layer_types")


def _alone(fields: Fields) -> bool:
    """Return true if a layer is a mixer or an MLP, and never both."""
    if isinstance(fields.get("hybrid_override_pattern"), str):
        return True
    return fields.model_type == "nemotron_h" and isinstance(_types(fields), list)
