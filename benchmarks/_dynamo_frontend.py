"""Dynamo's frontend, for gateway.py: a worker of its own kind stands before each engine (``peers/dynamo_worker.py``)."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
PYTHON = HERE.parent / "build" / "peers" / "dynamo-frontend" / "bin" / "python"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 257,
    "max_position_embeddings": 1 << 20,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "torch_dtype": "float32",
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def write_model(folder: Path) -> None:
    """A model's folder with a tokenizer to which each byte is a token, as it is to the mock."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # A byte level tokenizer writes bytes as letters: those that can be seen as they are, the others from 256 on.
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    vocabulary = {chr(byte if byte in seen else next(others)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|eos|>", special=True)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|eos|>", "model_max_length": 1 << 20}
    for name, content in (
        ("config.json", SHAPE),
        ("generation_config.json", {"bos_token_id": 256, "eos_token_id": 256}),
        ("tokenizer_config.json", kind | {"chat_template": TEMPLATE}),
    ):
        (folder / name).write_text(json.dumps(content))


def environment(folder: Path) -> dict[str, str]:
    """What the frontend and its workers find each other by."""
    return {"DYN_FILE_KV": str(folder / "dynamo-files"), "DYN_LOG": "warn", "DYN_SYSTEM_PORT": "-1"}


def prepare(folder: Path) -> None:
    """Nothing is left of workers before; the model is there."""
    shutil.rmtree(folder / "dynamo-files", ignore_errors=True)
    (folder / "dynamo-files").mkdir(parents=True)
    write_model(folder / "byte-model")


def workers(
    engines: list[str], events: list[tuple[str, str]], folder: Path, block_size: int, blocks: int, pace_ms: float
) -> list[list[str]]:
    """The command of a worker for each engine; without events it answers by itself, a token each ``pace_ms``."""
    common = [
        str(PYTHON),
        str(HERE / "peers" / "dynamo_worker.py"),
        str(folder / "byte-model"),
        str(block_size),
        str(blocks),
    ]
    if not events:
        return [[*common, "at-once", str(pace_ms)] for _ in engines]
    return [[*common, f"{url}/v1/completions", published] for url, (published, _) in zip(engines, events, strict=False)]


def frontend(port: int, policy: str, block_size: int) -> list[str]:
    return [
        *(str(PYTHON), "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)),
        *("--router-mode", policy or "kv", "--kv-cache-block-size", str(block_size)),
        *("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"),
    ]


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
