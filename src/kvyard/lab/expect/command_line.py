"""Settings from the command line that starts an engine: ``vllm serve``, SGLang's ``launch_server``, ``trtllm-serve``."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.engine.models.fields import hub_names
from kvyard.engine.models.memory import GIB
from kvyard.errors import KvyardError
from kvyard.replay.settings import SETTINGS

SWITCHES = (
    *("enable_prefix_caching", "enable_chunked_prefill", "enable_expert_parallel", "async_scheduling"),
    *("disable_radix_cache", "enable_lora", "trust_remote_code", "enable_hierarchical_cache", "enforce_eager"),
)
"""Flags that stand without a value."""
SHORT = {
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "q": "quantization",
}
OF_VLLM = {
    *("block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization"),
    *("kv_cache_dtype", "dtype", "quantization", "tensor_parallel_size", "pipeline_parallel_size", "dp_size"),
    *(
        "prefix_cache_retention_interval",
        "long_prefill_token_threshold",
        "scheduling_policy",
        "max_loras",
        "enable_prefix_caching",
    ),
    *("enable_chunked_prefill", "enable_expert_parallel", "async_scheduling"),
}
"""Flags with a setting of the same name."""
OF_SGLANG = {
    "page_size": "block_size",
    "context_length": "max_model_len",
    "max_running_requests": "max_num_seqs",
    "mem_fraction_static": "gpu_memory_utilization",
    "kv_cache_dtype": "kv_cache_dtype",
    "tensor_parallel_size": "tensor_parallel_size",
    "dp_size": "workers",
    "quantization": "quantization",
}
SGLANG_PAGE, TRTLLM_BLOCK = 1, 32
"""Tokens of a page and of a block that no flag names, in SGLang and in TensorRT-LLM."""
SGLANG_TABLE = ("schedule_policy", "chunked_prefill_size", "max_prefill_tokens", "radix_eviction_policy")
OF_TRTLLM = {
    "max_batch_size": "max_num_seqs",
    "max_num_tokens": "max_num_batched_tokens",
    "max_seq_len": "max_model_len",
    "kv_cache_free_gpu_memory_fraction": "gpu_memory_utilization",
    "tensor_parallel_size": "tensor_parallel_size",
    "tokens_per_block": "block_size",
}
EAGLE = ("eagle", "eagle3", "mtp", "deepseek_mtp", "draft_model")
"""Drafting methods that have the last block of a hit computed again."""

MODELLED_DRAFTS = 5
"""Draft tokens for which there are acceptance rates; hits don't depend on their number."""


class ServeLine(msgspec.Struct, kw_only=True):
    """An engine as its command line describes it."""

    engine: str
    """vllm, sglang or trtllm."""
    settings: dict[str, object]
    ignored: list[str]
    """Flags that change no hit, or that aren't modelled."""


def read_serve_line(text: str) -> ServeLine:
    """Read the command that starts an engine. Raises ``KvyardError`` for another command, and for values it can't read."""
    try:
        words = shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise KvyardError(f"the command line can't be read: {error}") from None
    while words and ("=" in words[0] and not words[0].startswith("-")):
        words.pop(0)  # environment variables before the command
    if words[:2] == ["vllm", "serve"]:
        return _vllm(words[2:])
    joined = " ".join(words[:4])
    for module, read in (("vllm.entrypoints.openai.api_server", _vllm), ("sglang.launch_server", _sglang)):
        if module in words:
            return read(words[words.index(module) + 1 :])
    if words[:2] == ["sglang", "serve"]:
        return _sglang(words[2:])
    if words[:1] == ["trtllm-serve"]:
        return _trtllm(words[2:] if words[1:2] == ["serve"] else words[1:])
    raise KvyardError(
        f"{joined!r} starts no engine that is known here: write vllm serve MODEL ..., python -m sglang.launch_server ..., "
        "or trtllm-serve MODEL ..."
    )


def _flags(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield names and values; a value without a name is the model."""
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("-"):
            yield "", word
            continue
        name, equals, value = word.lstrip("-").partition("=")
        name = SHORT.get(name.replace("-", "_"), name.replace("-", "_"))
        if equals:
            yield name, value
        elif (
            name in SWITCHES
            or name.startswith(("no_", "disable_"))
            or position == len(words)
            or _is_flag(words[position])
        ):
            yield name, None
        else:
            yield name, words[position]
            position += 1


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not word.lstrip("-")[:1].isdigit()


def _vllm(words: Sequence[str]) -> ServeLine:
    line = ServeLine(engine="vllm", settings={}, ignored=[])
    for name, value in _flags(words):
        on = not name.startswith("no_")
        bare = name.removeprefix("no_")
        if name in ("", "model"):
            line.settings["model"] = _model(value)
        elif bare in SWITCHES and bare in OF_VLLM and value is None:
            line.settings[bare] = on
        elif name in OF_VLLM and value is not None:
            line.settings[name] = value
        elif name == "num_gpu_blocks_override" and value is not None:
            line.settings["num_gpu_blocks"] = max(1, int(value) - 1)
        elif name == "kv_offloading_size" and value is not None:
            line.settings["host_bytes"] = round(float(value) * GIB)
        elif name == "speculative_config":
            _speculative(line, _table(name, value))
        else:
            line.ignored.append(name)
    return _checked(line)


def _speculative(line: ServeLine, table: dict[str, Any]) -> None:
    if str(table.get("method", "eagle")) not in EAGLE:
        line.ignored.append("speculative_config")  # a drafter without hidden states leaves hits as they are
        return
    count = table.get("num_speculative_tokens", 1)
    line.settings["num_speculative_tokens"] = min(count if isinstance(count, int) else 1, MODELLED_DRAFTS)


def _sglang(words: Sequence[str]) -> ServeLine:
    line = ServeLine(engine="sglang", settings={"backend": "sglang"}, ignored=[])
    table: dict[str, object] = {}
    for name, value in _flags(words):
        if name in ("", "model_path", "model"):
            line.settings["model"] = _model(value)
        elif name == "disable_radix_cache":
            line.settings["enable_prefix_caching"] = False
        elif name in SGLANG_TABLE and value is not None:
            value = {"fcfs": "fifo"}.get(value, value)
            table[name] = int(value) if value.lstrip("-").isdigit() else value
        elif name in OF_SGLANG and value is not None:
            line.settings[OF_SGLANG[name]] = value
        elif name == "max_total_tokens" and value is not None:
            line.settings["max_total_tokens"] = int(value)
        else:
            line.ignored.append(name)
    if table:
        line.settings["sglang"] = table
    tokens = line.settings.pop("max_total_tokens", None)
    line.settings.setdefault("block_size", SGLANG_PAGE)
    if isinstance(tokens, int):
        line.settings["num_gpu_blocks"] = tokens // int(str(line.settings["block_size"]))
    return _checked(line)


def _trtllm(words: Sequence[str]) -> ServeLine:
    line = ServeLine(engine="trtllm", settings={"backend": "trtllm", "block_size": TRTLLM_BLOCK}, ignored=[])
    for name, value in _flags(words):
        if name in ("", "model"):
            line.settings["model"] = _model(value)
        elif name in OF_TRTLLM and value is not None:
            line.settings[OF_TRTLLM[name]] = value
        else:
            line.ignored.append(name)
    return _checked(line)


def _model(value: str | None) -> str:
    """Return the preset of a model's name on the hub, or the name if it has none."""
    if value is None:
        raise KvyardError("the command line names no model: write it first, as in vllm serve MODEL")
    for hub, preset in hub_names().items():
        if value.lower() == hub.lower():
            return preset
    return value


def _table(name: str, value: str | None) -> dict[str, Any]:
    try:
        return msgspec.json.decode(value or "", type=dict[str, Any])
    except DECODE_ERRORS as error:
        raise KvyardError(f"--{name.replace('_', '-')} is no JSON object: {error}") from None


def _checked(line: ServeLine) -> ServeLine:
    SETTINGS.parse(line.settings)
    line.ignored = sorted(set(line.ignored))
    return line
