"""Write presets of models from public configs: the numbers that kvyard reads, and where they come from.

    python scripts/make_presets.py --wheel aiconfigurator_core-0.12.0-*.whl [--folder CONFIGS --source "..."] [NAME ...]

The wheel of aiconfigurator-core on PyPI (Apache-2.0) has the config.json of many models; ``--folder`` reads NAME/config.json
of a checkout of a repository, named by ``--source``. ``MODELS`` says which file becomes which preset. Existing ones are written
again. Nothing else of a config is kept: names of tokens, ropes and the like don't matter to memory or time.

Check new ones with tests/engine/models/record_weights.py and record_groups.py, which ask a real vLLM.
"""

from __future__ import annotations

import argparse
import json
import re
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "src" / "kvyard" / "engine" / "models" / "configs"

MODELS: dict[str, tuple[str, ...]] = {
    # preset: published names; the first names the file
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B",),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B",),
    "qwen3-14b": ("Qwen/Qwen3-14B",),
    "qwen3-32b-fp8": ("Qwen/Qwen3-32B-FP8",),
    "qwen3-30b-a3b-40k": ("Qwen/Qwen3-30B-A3B",),
    "qwen3-235b-a22b-40k": ("Qwen/Qwen3-235B-A22B",),
    "gemma-4-26b-a4b": ("google/gemma-4-26B-A4B",),
    "qwen3-30b-a3b-fp8": ("Qwen/Qwen3-30B-A3B-FP8",),
    "qwen3-235b-a22b-fp8": ("Qwen/Qwen3-235B-A22B-FP8",),
    "qwen3-coder-480b-a35b": ("Qwen/Qwen3-Coder-480B-A35B-Instruct",),
    "qwen3-vl-2b": ("Qwen/Qwen3-VL-2B-Instruct",),
    "qwen3-vl-4b": ("Qwen/Qwen3-VL-4B-Instruct",),
    "qwen3-vl-8b": ("Qwen/Qwen3-VL-8B-Instruct",),
    "qwen3-vl-30b-a3b": ("Qwen/Qwen3-VL-30B-A3B-Instruct",),
    "qwen3-vl-32b": ("Qwen/Qwen3-VL-32B-Instruct", "Qwen/Qwen3-VL-32B-Thinking"),
    "qwen3-vl-235b-a22b": ("Qwen/Qwen3-VL-235B-A22B-Instruct",),
    "qwen3.5-27b": ("Qwen/Qwen3.5-27B",),
    "qwen3.5-35b-a3b": ("Qwen/Qwen3.5-35B-A3B",),
    "qwen3.5-122b-a10b": ("Qwen/Qwen3.5-122B-A10B",),
    "qwen3.5-397b-a17b": ("Qwen/Qwen3.5-397B-A17B",),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B"),
    "deepseek-r1": ("deepseek-ai/DeepSeek-R1",),
    "llama-3.1-405b": (
        "meta-llama/Meta-Llama-3.1-405B",
        "meta-llama/Llama-3.1-405B",
        "meta-llama/Llama-3.1-405B-Instruct",
    ),
    "llama-2-7b": ("meta-llama/Llama-2-7b-hf",),
    "codellama-34b": ("codellama/CodeLlama-34b-Instruct-hf",),
    "llama-4-maverick": ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", "meta-llama/Llama-4-Maverick-17B-128E"),
    "mistral-nemo-12b": ("mistralai/Mistral-Nemo-Instruct-2407",),
    "mixtral-8x7b": ("mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    "mixtral-8x22b": ("mistralai/Mixtral-8x22B-v0.1", "mistralai/Mixtral-8x22B-Instruct-v0.1"),
    "kimi-k2": ("moonshotai/Kimi-K2-Instruct",),
    "kimi-k2.5": ("moonshotai/Kimi-K2.5",),
    "minimax-m2.5": ("MiniMaxAI/MiniMax-M2.5",),
    "minimax-m2.7": ("MiniMaxAI/MiniMax-M2.7",),
    "deepseek-v3.2": ("deepseek-ai/DeepSeek-V3.2",),
    "glm-5": ("zai-org/GLM-5",),
    "glm-5-fp8": ("zai-org/GLM-5-FP8",),
    "glm-5.1": ("zai-org/GLM-5.1",),
    "glm-5.1-fp8": ("zai-org/GLM-5.1-FP8",),
    "nemotron-3-ultra-550b-a55b": ("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",),
    "mimo-7b": ("XiaomiMiMo/MiMo-7B-Base",),
    "kimi-k2.5-nvfp4": ("nvidia/Kimi-K2.5-NVFP4",),
    "kimi-k2.6-nvfp4": ("nvidia/Kimi-K2.6-NVFP4",),
    "kimi-k2.7-code-nvfp4": ("nvidia/Kimi-K2.7-Code-NVFP4",),
    "minimax-m2.5-nvfp4": ("nvidia/MiniMax-M2.5-NVFP4",),
    "minimax-m2.7-nvfp4": ("nvidia/MiniMax-M2.7-NVFP4",),
    "qwen3.5-122b-a10b-nvfp4": ("nvidia/Qwen3.5-122B-A10B-NVFP4",),
    "qwen3.5-397b-a17b-nvfp4": ("nvidia/Qwen3.5-397B-A17B-NVFP4",),
    "nemotron-3-nano-30b-a3b": ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",),
    "nemotron-h-56b": ("nvidia/Nemotron-H-56B-Base-8K",),
    "yi-34b": ("01-ai/Yi-34B",),
}

FIELDS = """
architectures attention_bias attention_chunk_size attention_head_dim attention_k_eq_v attn_layer_indices
attn_layer_offset attn_layer_period attn_output_gate conv_kernel d_model decoder_sparse_step dtype enable_moe_block
expand expert_intermediate_size expert_layer_offset expert_layer_period first_k_dense_replace full_attention_interval
global_head_dim head_dim hidden_size hidden_size_per_layer_input hybrid_override_pattern index_head_dim index_n_heads
index_topk indexer_types interleave_moe_layer_step intermediate_size intermediate_size_mlp kv_lora_rank layer_types
layers_block_type linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads
linear_value_head_dim mamba_d_conv mamba_d_head mamba_d_ssm mamba_d_state mamba_expand mamba_head_dim mamba_n_groups
mamba_n_heads mamba_num_heads mamba_ssm_cache_dtype mamba_ssm_dtype max_position_embeddings max_window_layers
mlp_only_layers model_type moe_intermediate_size moe_latent_size moe_layers moe_num_experts
moe_shared_expert_intermediate_size n_groups n_routed_experts n_shared_experts no_rope_layers num_attention_heads
num_experts num_experts_per_tok num_global_key_value_heads num_hidden_layers num_key_value_heads num_kv_shared_layers
num_local_experts q_lora_rank qk_nope_head_dim qk_rope_head_dim shared_expert_intermediate_size sliding_window
sliding_window_pattern ssm_state_size tie_word_embeddings top_k_experts torch_dtype use_sliding_window v_head_dim
vocab_size
"""
KEPT = frozenset(FIELDS.split())
NESTED = ("text_config", "llm_config", "language_config")
QUANTISATION = ("quant_method", "quant_algo", "bits", "weight_block_size", "config_groups", "kv_cache_scheme")


def distilled(config: dict[str, Any], source: str, hub: tuple[str, ...]) -> dict[str, Any]:
    """Return what kvyard reads of ``config``, the language model's numbers at the top."""
    whole = dict(config)
    for name in NESTED:
        whole |= {key: value for key, value in (config.get(name) or {}).items() if value is not None}
    kept = {key: whole[key] for key in sorted(KEPT) if whole.get(key) is not None}
    kept["architectures"] = config.get("architectures") or kept.get("architectures")
    stored = config.get("quantization_config") or whole.get("quantization_config")
    if stored:
        kept["quantization_config"] = {key: stored[key] for key in QUANTISATION if key in stored}
        if stored.get("quant_algo"):
            # Of thousands of names: which kinds of layers are left as they are.
            kept["quantization_config"]["ignore"] = sorted(
                {re.sub(r"\d+", "*", name) for name in stored.get("ignore") or ()}
            )
    towers = [name for name in ("vision_config", "audio_config") if config.get(name)]
    note = " (the vision tower is left out)" if towers else ""
    return {"source": f"config.json of {hub[0]} in {source}{note}", "hub": list(hub), **kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--wheel", type=Path, help="aiconfigurator_core's wheel")
    parser.add_argument("--folder", type=Path, help="a folder with NAME/config.json")
    parser.add_argument("--source", help="what the folder is: repository and commit")
    parser.add_argument("names", nargs="*", help="presets; all by default")
    args = parser.parse_args()
    if (args.wheel is None) == (args.folder is None):
        parser.error("give --wheel, or --folder with --source")
    for name in args.names or MODELS:
        hub = MODELS[name]
        if args.wheel:
            path = (
                zipfile.Path(args.wheel) / f"aiconfigurator_core/model_configs/{hub[0].replace('/', '--')}_config.json"
            )
            source = args.wheel.name.rsplit("-", 3)[0].replace("_", "-") + " on PyPI"
        else:
            path, source = args.folder / hub[0].rpartition("/")[2].lower() / "config.json", args.source
        if not path.exists():
            print(f"{name}: not there")
            continue
        preset = distilled(json.loads(path.read_text()), source, hub)
        (CONFIGS / f"{name}.json").write_text(json.dumps(preset, indent=2) + "\n")
        print(f"{name}: written")


if __name__ == "__main__":
    main()
