"""Write stand-ins for the models that vLLM's tests name, into a Hugging Face cache. Runs with vLLM's Python.

    build/peers/vllm/bin/python scripts/vllm_suite/models.py build/vllm-suite/hf

Tests of the scheduler read a model's configuration and never its weights. Each stand-in is the default configuration of the
model's class in `transformers`, which has the shape of the model, and a tokenizer of 1,024 tokens. Models that a test runs are
tiny, with weights. A stand-in that exists is left alone.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import tiny_models

CONFIGURATIONS = {
    "facebook/opt-125m": ("OPTConfig", "OPTForCausalLM", {}),
    "facebook/opt-350m": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "ffn_dim": 4096,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
    ),
    "llava-hf/llava-1.5-7b-hf": (
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        {"text_config": {"model_type": "llama", "max_position_embeddings": 4096}},
    ),
    "Qwen/Qwen2.5-VL-3B-Instruct": ("Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration", {}),
    "Qwen/Qwen1.5-7B": ("Qwen2Config", "Qwen2ForCausalLM", {}),
}
"""Model -> configuration class, architecture, and where its shape isn't the class's default."""
IMAGES = {
    "preprocessor_config.json": {
        "image_processor_type": "CLIPImageProcessor",
        "processor_class": "LlavaProcessor",
        "size": {"shortest_edge": 336},
        "crop_size": {"height": 336, "width": 336},
    },
    "processor_config.json": {
        "processor_class": "LlavaProcessor",
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
        "image_token": "<image>",
        "num_additional_image_tokens": 1,
    },
}
"""How the vision model reads images."""
NO_WEIGHTS = b'{"__metadata__":{}}     '
TINY = {
    "hmellor/tiny-random-LlamaForCausalLM": ("llama", 8192),
    "Qwen/Qwen3-0.6B": ("llama", 40960),
    "meta-llama/Llama-3.2-1B-Instruct": ("llama", 131072),
    "google/gemma-3-1b-it": ("gemma3", 32768),
}
"""Model that a test starts -> the tiny model that stands in for it, and the model's own longest context."""


def main() -> None:
    """Write what is missing."""
    hub = Path(sys.argv[1]) / "hub"
    tokenizer = tiny_models.learn_tokenizer()
    for name in [*CONFIGURATIONS, *TINY]:
        place = hub / ("models--" + name.replace("/", "--"))
        if (place / "refs" / "main").exists():
            continue
        snapshot = place / "snapshots" / "0"
        shutil.rmtree(place, ignore_errors=True)  # what an earlier run didn't finish
        snapshot.parent.mkdir(parents=True)
        tiny, longest = TINY.get(name, ("llama", tiny_models.LONGEST))
        shape = tiny_models.MODELS[tiny] | {"max_position_embeddings": longest}
        tiny_models.write_model(snapshot, shape, tokenizer, weights=name in TINY)
        if name in CONFIGURATIONS:
            kind, architecture, shape = CONFIGURATIONS[name]
            configuration = getattr(transformers, kind)(architectures=[architecture], **shape)
            tiny_models.write_json(snapshot / "config.json", configuration.to_dict())
        for file, content in IMAGES.items() if "llava" in name else ():
            tiny_models.write_json(snapshot / file, content)
        if name not in TINY:  # without weights to look at, vLLM asks for them, twice
            (snapshot / "model.safetensors").write_bytes(len(NO_WEIGHTS).to_bytes(8, "little") + NO_WEIGHTS)
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / "main").write_text("0")


if __name__ == "__main__":
    main()
