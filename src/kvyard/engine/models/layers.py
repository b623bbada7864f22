"""Kind of each layer of a model, and its contents in the cache.

Two steps: ``mixers`` reads how the layers mix tokens (full attention, a window, a state, ...), and ``cache_layers`` returns
the bytes that this keeps per token or per state on one rank. Layers are grouped into shared blocks in
``kvyard.engine.models.grouping``.
"""

from collections.abc import Sequence

import msgspec

from kvyard.engine.models.fields import Fields
from kvyard.errors import KvyardError

TYPE_NAMES = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "sliding_window": "window",
    "chunked_attention": "chunk",
    "linear_attention": "delta",
    "mamba": "mamba",
    "mamba2": "mamba",
    "hybrid": "both",
    "mlp": "none",
    "moe": "none",
}
NEEDED = {
    "mla": ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    "window": ("sliding_window",),
    "mamba": ("mamba_state", "mamba_conv"),
    "mamba1": ("mamba_state", "mamba_conv"),
    "both": ("mamba_state", "mamba_conv"),
    "delta": ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
}
"""Fields that a kind of layer can't do without."""
PATTERN = {"M": "mamba", "*": "full", "-": "none", "E": "none"}


class CacheLayer(msgspec.Struct, frozen=True, kw_only=True):
    """Cache of one layer on one rank: bytes per token, or, for a state, per state."""

    kind: str
    """A kind of ``kvyard.blocks.spec``."""
    number: int = 0
    """Number of the layer in its model."""
    token_bytes: int = 0
    state_bytes: int = 0
    window: int | None = None
    chunk: int | None = None


class Precision(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one element of what is cached."""

    cache: int
    state: int
    """Type of a convolution's state."""
    ssm: int
    """Type of a recurrent state."""


def mixers(fields: Fields) -> list[str]:
    """Return for each layer ``full``, ``mla``, ``window``, ``chunk``, ``mamba``, ``mamba1``, ``delta``, ``both`` or ``none``.

    Raises ``KvyardError`` if the config doesn't say, or names a kind without what that kind needs.
    """
    kinds = _mixers(fields)
    fields.require(*dict.fromkeys(name for kind in dict.fromkeys(kinds) for name in NEEDED.get(kind, ())))
    return kinds


def _mixers(fields: Fields) -> list[str]:
    if fields.get("compress_ratios") is not None or fields.get("indexer_types") is not None:
        raise KvyardError(
            f"{fields.architecture}: compressed attention, and indexes that layers share, are not supported"
        )
    if fields.get("index_topk") is not None:
        fields.require("kv_lora_rank", "index_head_dim", "index_n_heads")
    pattern = fields.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        unknown = sorted(set(pattern) - set(PATTERN))
        if unknown:
            raise KvyardError(
                f"{fields.architecture}: hybrid_override_pattern has unknown letters {''.join(unknown)!r}"
            )
        return [PATTERN[letter] for letter in pattern]
    types = fields.get("layers_block_type") or fields.get("layer_types")
    count = len(types) if isinstance(types, list) and fields.get("num_hidden_layers") is None else None
    count = fields.integer("num_hidden_layers") if count is None else count
    if isinstance(types, list):
        return _shared(fields, _typed(fields, types, count))
    if fields.get("kv_lora_rank") is not None:
        return ["mla"] * count
    if fields.model_type == "falcon_h1":
        return ["both"] * count
    if fields.get("attn_layer_indices") is not None:
        chosen = set(fields.get("attn_layer_indices"))
        return ["full" if index in chosen else "mamba" for index in range(count)]
    if fields.get("attn_layer_period") is not None:
        period, offset = fields.integer("attn_layer_period"), fields.integer("attn_layer_offset", 0)
        return ["full" if index % period == offset else "mamba1" for index in range(count)]
    if fields.get("full_attention_interval") is not None:
        interval = fields.integer("full_attention_interval")
        return ["full" if (index + 1) % interval == 0 else "delta" for index in range(count)]
    if fields.get("attention_chunk_size") is not None:
        turning = fields.get("no_rope_layers") or [(index + 1) % 4 for index in range(count)]
        return ["chunk" if turns else "full" for turns in turning]
    return _shared(fields, _windows(fields, count))


def cache_layers(fields: Fields, precision: Precision, ranks: int) -> list[CacheLayer]:
    """Return the cache of each layer on one rank. Raises ``KvyardError`` for shapes that can't be split."""
    layers = []
    for number, kind in enumerate(mixers(fields)):
        if kind in ("mamba", "mamba1", "delta", "both"):
            of = {"mamba1": _mamba1_bytes, "delta": _delta_bytes}.get(kind, _mamba_bytes)
            layers.append(CacheLayer(kind="mamba", number=number, state_bytes=of(fields, precision, ranks)))
        if kind == "mla":
            # Every rank holds all of it.
            layers.append(CacheLayer(kind="mla", number=number, token_bytes=_latent_bytes(fields, precision)))
        elif kind in ("window", "chunk", "full", "both"):
            size = _attention_bytes(fields, precision, ranks, everywhere=kind in ("full", "both"))
            layer = CacheLayer(kind="full", number=number, token_bytes=size)
            if kind == "window":
                window = fields.integer("sliding_window")
                layer = msgspec.structs.replace(layer, kind="sliding_window", window=window)
            elif kind == "chunk":
                chunk = fields.integer("attention_chunk_size")
                layer = msgspec.structs.replace(layer, kind="chunked_local", chunk=chunk)
            layers.append(layer)
    if not layers:
        raise KvyardError(f"{fields.architecture}: no layer of this model keeps a cache")
    return layers


def head_dim(fields: Fields) -> int:
    """Return the width of an attention head."""
    if fields.get("head_dim") is not None:
        return fields.integer("head_dim")
    return fields.integer("hidden_size") // fields.integer("num_attention_heads")


def kv_heads(fields: Fields, everywhere: bool) -> tuple[int, int]:
    """Return the number of KV heads and the size of a head. Layers that attend ``everywhere`` have others in some models."""
    heads = fields.integer("num_key_value_heads", fields.integer("num_attention_heads"))
    if everywhere and fields.get("global_head_dim") is not None:
        return fields.integer("num_global_key_value_heads", heads), fields.integer("global_head_dim")
    return heads, head_dim(fields)


def check_heads(fields: Fields, heads: int, kv_heads: int, ranks: int) -> None:
    """Raise ``KvyardError``, with the numbers of ranks that would do, unless heads can be split over ``ranks``."""

    def fits(count: int) -> bool:
        return not heads % count and not (kv_heads % count and count % kv_heads)

    if not fits(ranks):
        few = ", ".join(str(count) for count in range(1, heads + 1) if fits(count))
        shared = f" with {kv_heads} KV heads" if kv_heads not in (1, heads) else ""
        raise KvyardError(
            f"{fields.architecture}: {heads} heads{shared} can't be split over {ranks} ranks;"
            f" tensor_parallel_size may be {few}"
        )


def conv_width(fields: Fields, ranks: int = 1) -> int:
    """Return channels of a Mamba-2 layer's convolution, over all ranks: the groups are repeated until each rank has one."""
    groups = fields.integer("mamba_groups", 1)
    if groups % ranks:
        groups = ranks
    return mamba_width(fields) + 2 * groups * fields.integer("mamba_state")


def mamba_width(fields: Fields) -> int:
    """Return the inner width of a Mamba layer."""
    if fields.get("mamba_d_ssm") is not None:
        return fields.integer("mamba_d_ssm")
    size = fields.get("mamba_head_dim")
    if fields.get("mamba_heads") is not None and isinstance(size, int):
        return fields.integer("mamba_heads") * size
    return fields.integer("mamba_expand", 2) * fields.integer("hidden_size")


def _typed(fields: Fields, types: Sequence[object], count: int) -> list[str]:
    unknown = sorted({str(name) for name in types if name not in TYPE_NAMES})
    if unknown:
        raise KvyardError(f"{fields.architecture}: unknown layer types {', '.join(unknown)}")
    if len(types) != count:
        raise KvyardError(f"{fields.architecture}: {len(types)} layer types for {count} layers")
    kinds = [TYPE_NAMES[str(name)] for name in types]
    if fields.get("mamba_state") is not None and fields.get("linear_num_value_heads") is None:
        kinds = ["mamba" if kind == "delta" else kind for kind in kinds]
    if fields.get("kv_lora_rank") is not None:
        kinds = ["mla" if kind == "full" else kind for kind in kinds]
    return kinds


def _windows(fields: Fields, count: int) -> list[str]:
    """Return models whose layers are attention with or without a window, by the conventions of each family."""
    window = fields.get("sliding_window")
    if window is None or fields.get("use_sliding_window") is False:
        return ["full"] * count
    if fields.model_type == "gemma2":
        return ["window" if index % 2 == 0 else "full" for index in range(count)]
    every = fields.get("sliding_window_pattern")
    if every is None and fields.model_type.startswith("gemma3"):
        every = 6
    if isinstance(every, int) and every > 1:
        return ["full" if (index + 1) % every == 0 else "window" for index in range(count)]
    if fields.get("max_window_layers") is not None:
        full = fields.integer("max_window_layers")
        return ["full" if index < full else "window" for index in range(count)]
    return ["window"] * count


def _shared(fields: Fields, kinds: list[str]) -> list[str]:
    """Replace layers that read the cache of an earlier layer by layers without a cache."""
    shared = fields.integer("num_kv_shared_layers", 0)
    return kinds[: len(kinds) - shared] + ["none"] * shared


def _attention_bytes(fields: Fields, precision: Precision, ranks: int, everywhere: bool = False) -> int:
    """Return keys and values of one token. Heads are split over ranks, and repeated when there are fewer of them than ranks."""
    stored, width = kv_heads(fields, everywhere)
    check_heads(fields, fields.integer("num_attention_heads"), stored, ranks)
    return 2 * max(1, stored // ranks) * width * precision.cache


def _latent_bytes(fields: Fields, precision: Precision) -> int:
    """Return MLA's bytes of one token. With sparse attention they include the key of its index, 8 bits with a scale for
    each 128 of them; an 8-bit cache then has scales for each 128, and 16 bits for the rotated part.
    """
    rank, turned = fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim")
    if fields.get("index_topk") is None:
        return (rank + turned) * precision.cache
    key = fields.integer("index_head_dim")
    latent = (rank + turned) * precision.cache if precision.cache > 1 else rank + rank // 128 * 4 + 2 * turned
    return latent + key + key // 128 * 4


def _mamba_bytes(fields: Fields, precision: Precision, ranks: int) -> int:
    state, width = fields.integer("mamba_state"), mamba_width(fields)
    if width % ranks or conv_width(fields, ranks) % ranks:
        raise KvyardError(f"{fields.architecture}: its Mamba layers can't be split over {ranks} ranks")
    conv = conv_width(fields, ranks) // ranks * (fields.integer("mamba_conv") - 1)
    return conv * precision.state + width // ranks * state * precision.ssm


def _mamba1_bytes(fields: Fields, precision: Precision, ranks: int) -> int:
    width = mamba_width(fields) // ranks
    return width * (
        (fields.integer("mamba_conv") - 1) * precision.state + fields.integer("mamba_state") * precision.ssm
    )


def _delta_bytes(fields: Fields, precision: Precision, ranks: int) -> int:
    keys, values = fields.integer("linear_num_key_heads"), fields.integer("linear_num_value_heads")
    key, value = fields.integer("linear_key_head_dim"), fields.integer("linear_value_head_dim")
    if keys % ranks or values % ranks:
        raise KvyardError(f"{fields.architecture}: its linear attention can't be split over {ranks} ranks")
    conv = (2 * keys * key + values * value) // ranks * (fields.integer("linear_conv_kernel_dim", 4) - 1)
    return conv * precision.state + values // ranks * key * value * precision.ssm
