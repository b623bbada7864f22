"""Settings from the command line that starts an engine: ``vllm serve``, SGLang's ``launch_server``, ``trtllm-serve``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath

from kvyard.errors import KvyardError
from kvyard.lab.expect.engine_flags import Flag, ServeLine, read_sglang, read_trtllm, read_vllm
from kvyard.replay.settings import SETTINGS

Read = Callable[[Sequence[Flag]], ServeLine]

MODULES: dict[str, Read] = {
    "vllm.entrypoints.openai.api_server": read_vllm,
    "vllm.entrypoints.cli.main": read_vllm,
    "sglang.launch_server": read_sglang,
}
IMAGES: dict[str, Read] = {"vllm/vllm-openai": read_vllm}
"""Images whose entry point is the engine, so that its flags follow their name."""
SWITCHES = {
    *("async_scheduling", "trust_remote_code", "enforce_eager", "data_parallel_hybrid_lb", "data_parallel_external_lb"),
    *("kv_sharing_fast_prefill", "swa_bounded_replay", "language_model_only", "skip_mm_profiling"),
    *(
        "long_prefill_token_threshold_adaptive",
        "scheduler_reserve_full_isl",
        "skip_tokenizer_init",
        "skip_server_warmup",
    ),
    *("log_requests", "show_time_cost", "schedule_low_priority_values_first"),
}
"""Flags that stand without a value, beside those that begin with ``SWITCHED``."""
SWITCHED = ("no_", "enable_", "disable_", "use_", "return_")
SEVERAL = {
    *(
        "served_model_name",
        "lora_modules",
        "lora_paths",
        "lora_target_modules",
        "allowed_media_domains",
        "ignore_patterns",
    ),
    *("logits_processors", "sleep_preserve_parameter_names", "numa_bind_nodes", "numa_bind_cpus", "offload_params"),
    *("kv_cache_dtype_skip_layers", "cpu_offload_params", "collect_detailed_traces", "cudagraph_capture_sizes"),
    *("middleware", "api_key", "cuda_graph_bs"),
}
"""Flags with any number of values."""
SHORT = {
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "ep": "enable_expert_parallel",
    "dcp": "decode_context_parallel_size",
    "pcp": "prefill_context_parallel_size",
    "sc": "speculative_config",
    "device_memory_utilization": "gpu_memory_utilization",
    "speculative_algo": "speculative_algorithm",
    "free_gpu_memory_fraction": "kv_cache_free_gpu_memory_fraction",
    "q": "quantization",
}
_SHELL = re.compile(r"\d?>|[|&;<]")
"""Tokens that end a command in a shell."""


def read_serve_line(text: str) -> ServeLine:
    """Read the command that starts an engine. Raises ``KvyardError`` for another command, and for values it can't read.

    What stands before the engine (variables, ``nohup``, ``docker run``) and behind it (``> log &``) is passed over.
    """
    try:
        words = shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise KvyardError(f"the command line can't be read: {error}") from None
    for position, word in enumerate(words):
        if position and _SHELL.match(word):
            words = words[:position]
            break
    read, rest = _engine(words)
    line = read(list(_flags(rest)))
    SETTINGS.parse(line.settings)
    return line


def _engine(words: Sequence[str]) -> tuple[Read, Sequence[str]]:
    """Return the reader of the engine that is started, and the words behind its name."""
    for position, word in enumerate(words):
        rest, program = words[position + 1 :], PurePath(word).name
        if word in MODULES:
            return MODULES[word], rest[1:] if rest[:1] == ["serve"] else rest
        if program in ("vllm", "sglang") and rest[:1] == ["serve"]:
            return read_vllm if program == "vllm" else read_sglang, rest[1:]
        if program == "trtllm-serve":
            return read_trtllm, rest[1:] if rest[:1] == ["serve"] else rest
    for position, word in enumerate(words):
        for image, read in IMAGES.items():
            if word == image or word.startswith((f"{image}:", f"{image}@")):
                return read, words[position + 1 :]
    shown = " ".join(words[:4])
    raise KvyardError(
        f"{shown!r} starts no engine that is known here: write vllm serve MODEL ..., python -m sglang.launch_server ..., "
        "or trtllm-serve MODEL ..."
    )


def _flags(words: Sequence[str]) -> Iterator[Flag]:
    """Yield names and values; a value without a name is the model."""
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not _is_flag(word):
            yield Flag("", word)
            continue
        spelt, equals, value = word.partition("=")
        name, dot, member = spelt.lstrip("-").partition(".")
        name = name.replace("-", "_")
        name = SHORT.get(name, name) + dot + member
        end = position
        while end < len(words) and not _is_flag(words[end]):
            end += 1
        if equals:
            yield Flag(name, value)
        elif name in SWITCHES or name.startswith(SWITCHED):
            if position < end and words[position].lower() in ("true", "false"):
                yield Flag(name, words[position])
                position += 1
            else:
                yield Flag(name, None)
        elif name in SEVERAL:
            yield Flag(name, " ".join(words[position:end]))
            position = end
        else:
            yield Flag(name, words[position] if position < end else None)
            position = min(position + 1, end)


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not word.lstrip("-")[:1].isdigit()
