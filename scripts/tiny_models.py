"""Writes tiny models that a real vLLM serves on CPU within seconds. Run it with the Python of ``make peers ARGS=vllm``.

    build/peers/vllm/bin/python scripts/tiny_models.py [build/models [NAME...]]

``llama`` has full attention only; ``gemma3`` has layers with full attention and layers with a sliding window of 128. Both come
without weights: vLLM makes random ones, the same each time (``--load-format dummy``). ``llama-weights`` and ``gemma3-weights``
are the same with weights by which an answer depends on all of its prompt. ``lora-a`` and ``lora-b`` are adapters for ``llama``.
``mellum-weights`` has windows too, and SGLang has a pool of its own for them; it is written only where named, and needs
transformers 5.22. The tokenizer learns 1,024 tokens from the licence, a text that doesn't change, so that prompts have the same
ids wherever and whenever this runs; text begins with a token of its own, as with Llama. What exists already is left alone.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import inside_vllm

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "LICENSE"
BEGIN, TURN, END = "<|begin|>", "<|im_start|>", "<|im_end|>"
LONGEST = 8192
VOCABULARY = 1024
# As `render` of kvyard.server.tokens writes conversations, so that the mock counts as many tokens.
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIDDEN, HEADS, KV_HEADS, HEAD = 128, 4, 2, 32
SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LONGEST,
    "dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
LAYERS = 2
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "hidden_act": "silu",
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "sliding_window": 128,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": HEAD,
        "rope_local_base_freq": 10000.0,
    },
}
WEIGHTED = {f"{name}-weights": config for name, config in MODELS.items()}
MELLUM: dict[str, Any] = {
    "architectures": ["MellumForCausalLM"],
    "model_type": "mellum",
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "mlp_layer_types": ["dense"] * 6,
    "sliding_window": 128,
    "hidden_act": "silu",
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")
    },
}
ADAPTERS = {"lora-a": 1, "lora-b": 2}
"""Adapters and the seeds of their weights."""
RANK = 8


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def learn_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BEGIN, TURN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT.read_text()], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)])
    return tokenizer


def write_model(folder: Path, config: dict[str, Any], tokenizer: Any, weights: bool) -> None:
    if weights:
        inside_vllm.write_model(folder, SHAPE | config)
    else:
        folder.mkdir()
        write_json(folder / "config.json", SHAPE | config)
    write_json(folder / "generation_config.json", {"eos_token_id": SHAPE["eos_token_id"], "do_sample": False})
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN,
            "eos_token": END,
            "chat_template": TEMPLATE,
            "model_max_length": LONGEST,
        },
    )


def write_adapter(folder: Path, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for part, size in (("q_proj", HEADS * HEAD), ("v_proj", KV_HEADS * HEAD)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            weights[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=generator)
            weights[f"{name}.lora_B.weight"] = torch.randn(size, RANK, generator=generator)
    save_file(weights, str(folder / "adapter_model.safetensors"))
    write_json(
        folder / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "llama",
            "r": RANK,
            "lora_alpha": 2 * RANK,
            "target_modules": ["q_proj", "v_proj"],
            "bias": "none",
        },
    )


def main() -> None:
    """Write what is missing."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "models"
    wanted = sys.argv[2:] or [*MODELS, *WEIGHTED, *ADAPTERS]
    known = MODELS | WEIGHTED | {"mellum-weights": MELLUM}
    missing = [name for name in wanted if not (out / name).exists()]
    if not missing:
        return
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = learn_tokenizer()
    for name in missing:
        # Whole or not at all: a folder that is there is taken for a model.
        with tempfile.TemporaryDirectory(dir=out, prefix=".making-") as place:
            folder = Path(place) / name
            if name in ADAPTERS:
                folder.mkdir()
                write_adapter(folder, ADAPTERS[name])
            else:
                write_model(folder, known[name], tokenizer, weights=name.endswith("-weights"))
            shutil.move(folder, out / name)
    print(f"tiny models: {', '.join(missing)} in {out}")


if __name__ == "__main__":
    main()
