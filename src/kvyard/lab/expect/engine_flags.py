"""Flags of vLLM, SGLang and TensorRT-LLM as settings."""

from __future__ import annotations

import re
import types
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.engine.models.fields import hub_preset
from kvyard.engine.models.memory import GIB
from kvyard.engine.policies.settings import SglangSettings
from kvyard.errors import KvyardError
from kvyard.settings import count, number

OF_VLLM = {
    *("block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_num_scheduled_tokens"),
    *("gpu_memory_utilization", "kv_cache_dtype", "dtype", "quantization", "tensor_parallel_size"),
    *("pipeline_parallel_size", "dp_size", "prefix_cache_retention_interval", "long_prefill_token_threshold"),
    *("scheduling_policy", "max_loras", "watermark"),
}
"""Flags with a setting of the same name."""
SWITCHES_OF_VLLM = {
    *("enable_prefix_caching", "enable_chunked_prefill", "enable_expert_parallel", "async_scheduling"),
    "long_prefill_token_threshold_adaptive",
}
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
OF_TRTLLM = {
    "max_batch_size": "max_num_seqs",
    "max_num_tokens": "max_num_batched_tokens",
    "max_seq_len": "max_model_len",
    "kv_cache_free_gpu_memory_fraction": "gpu_memory_utilization",
    "tensor_parallel_size": "tensor_parallel_size",
    "tokens_per_block": "block_size",
}
UNMODELLED = {
    *("config", "hf_overrides", "hf_config_path", "json_model_override_args", "extra_llm_api_options", "scheduler_cls"),
    *("decode_context_parallel_size", "prefill_context_parallel_size", "attn_cp_size", "disable_sliding_window"),
    *("kv_cache_memory_bytes", "kv_cache_dtype_skip_layers", "cpu_offload_gb", "disable_hybrid_kv_cache_manager"),
    *("mamba_block_size", "mamba_cache_mode", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "prefix_match_unit"),
    *("enable_mamba_shared_prefix_checkpoint", "swa_bounded_replay", "use_replayssm", "kv_sharing_fast_prefill"),
    *("enable_lmcache", "disaggregation_mode", "hicache_storage_backend", "enable_dp_attention", "language_model_only"),
}
"""Flags that hits depend on, and that aren't read."""
DRAFTING_HEADS = ("eagle", "mtp", "dflash", "dspark")
"""Part of the name of a drafting method of vLLM that has the last block of a hit computed again."""
MODELLED_DRAFTS = 5
"""Draft tokens for which there are acceptance rates; hits don't depend on their number."""
SGLANG_HEADS = ("EAGLE", "EAGLE3", "NEXTN")
CPU_CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector")
"""vLLM's connectors to host memory."""
BINARY = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Flag(NamedTuple):
    """A flag with underscores for dashes, and its value; the model that stands alone has no name."""

    name: str
    value: str | None


class ServeLine(msgspec.Struct, kw_only=True):
    """An engine as its command line describes it."""

    engine: str
    """vllm, sglang or trtllm."""
    settings: dict[str, object]
    ignored: list[str] = []
    """Flags that aren't read."""
    unmodelled: list[str] = []
    """Of those, flags that hits depend on."""

    def leave_out(self, name: str) -> None:
        """Enter a flag that isn't read."""
        into = self.unmodelled if name.partition(".")[0] in UNMODELLED else self.ignored
        if name not in into:
            into.append(name)


def read_vllm(flags: Sequence[Flag]) -> ServeLine:
    """Return the engine that ``vllm serve`` starts with ``flags``."""
    line = ServeLine(engine="vllm", settings={})
    tables: dict[str, dict[str, Any]] = {"speculative_config": {}, "kv_transfer_config": {}}
    drafter = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
    for name, value in flags:
        table, _, member = name.partition(".")
        bare = name.removeprefix("no_")
        if name in ("", "model"):
            line.settings.setdefault("model", _model(value))
        elif bare in SWITCHES_OF_VLLM:
            line.settings[bare] = (value or "true").lower() == "true" and bare == name
        elif name == "max_model_len" and _given(name, value).lower() in ("auto", "-1"):
            pass  # the model's, as far as it fits
        elif name == "dtype" and value in ("float32", "float"):
            line.unmodelled.append(f"dtype {value}")
        elif name in OF_VLLM:
            line.settings[name] = _count_of_vllm(_given(name, value))
        elif name == "num_gpu_blocks_override":
            line.settings["num_gpu_blocks"] = max(1, count(_spelt(name), _given(name, value)) - 1)
        elif name == "kv_offloading_size":
            line.settings["host_bytes"] = round(number(_spelt(name), _given(name, value)) * GIB)
        elif name == "kv_offloading_backend" and value == "lmcache":
            line.unmodelled.append("kv_offloading_backend lmcache")
        elif table in tables:
            tables[table] |= {member: _number_or_text(value)} if member else _table(name, value)
        elif name in drafter:
            tables["speculative_config"][drafter[name]] = _number_or_text(value)
        else:
            line.leave_out(name)
    if tables["speculative_config"]:
        _speculate(line, tables["speculative_config"])
    if tables["kv_transfer_config"]:
        _offload(line, tables["kv_transfer_config"])
    if "dp_size" in line.settings:
        line.settings["router"] = "least-loaded"  # among its ranks
    return line


def _speculate(line: ServeLine, table: dict[str, Any]) -> None:
    """Enter a drafter. Without a head that reads hidden states hits are those of no drafter."""
    method = str(table.get("method") or table.get("model") or "").lower()
    if not any(head in method for head in DRAFTING_HEADS) or table.get("disable_eagle_block_drop"):
        line.leave_out("speculative_config")
        return
    count = table.get("num_speculative_tokens", 1)
    line.settings["num_speculative_tokens"] = min(count if isinstance(count, int) else 1, MODELLED_DRAFTS)


def _offload(line: ServeLine, table: dict[str, Any]) -> None:
    """Enter host memory that a connector of vLLM's own keeps blocks in."""
    extra = table.get("kv_connector_extra_config")
    size = extra.get("cpu_bytes_to_use") if isinstance(extra, dict) else None
    if table.get("kv_connector") in CPU_CONNECTORS and isinstance(size, int) and isinstance(extra, dict):
        line.settings["host_bytes"] = size
        if len(extra) == 1:
            return
    line.unmodelled.append(f"kv_transfer_config ({table.get('kv_connector')})")


def read_sglang(flags: Sequence[Flag]) -> ServeLine:
    """Return the engine that SGLang's ``launch_server`` starts with ``flags``."""
    line = ServeLine(engine="sglang", settings={"backend": "sglang"})
    own = get_type_hints(SglangSettings)
    table: dict[str, object] = {}
    others: dict[str, str | None] = {}
    for name, value in flags:
        if name in ("", "model_path", "model"):
            line.settings.setdefault("model", _model(value))
        elif name == "disable_radix_cache":
            line.settings["enable_prefix_caching"] = False
        elif name in own and not name.startswith("speculative_"):
            table[name] = _member(name, {"fcfs": "fifo"}.get(value or "", value), own[name])
        elif name in OF_SGLANG:
            line.settings[OF_SGLANG[name]] = _given(name, value)
        else:
            others[name] = value
    page = count("--page-size", line.settings.setdefault("block_size", SGLANG_PAGE))
    if "max_total_tokens" in others:
        given = _given("max_total_tokens", others.pop("max_total_tokens"))
        line.settings["num_gpu_blocks"] = max(1, count("--max-total-tokens", given) // max(1, page))
    if "enable_hierarchical_cache" in others:
        _hicache(line, others)
    if "speculative_algorithm" in others:
        _draft(line, others, table)
    for name in others:
        line.leave_out(name)
    if table:
        line.settings["sglang"] = table
    if "workers" in line.settings:
        line.settings["router"] = "round-robin"  # of its data-parallel controller
    return line


def _hicache(line: ServeLine, flags: dict[str, str | None]) -> None:
    """Enter SGLang's cache in host memory: ``--hicache-size`` in GB, or so many times the device's tokens."""
    flags.pop("enable_hierarchical_cache")
    size, ratio = flags.pop("hicache_size", None), flags.pop("hicache_ratio", None) or "2"
    blocks = line.settings.get("num_gpu_blocks")
    if size is not None and number("--hicache-size", size):
        line.settings["host_bytes"] = round(number("--hicache-size", size) * 1e9)
    elif isinstance(blocks, int):
        line.settings["host_blocks"] = round(number("--hicache-ratio", ratio) * blocks)
    else:
        line.unmodelled.append("enable_hierarchical_cache without --hicache-size")


def _draft(line: ServeLine, flags: dict[str, str | None], table: dict[str, object]) -> None:
    """Enter SGLang's drafts, if their number is given: by default it is the model's."""
    algorithm, steps = flags.pop("speculative_algorithm"), flags.pop("speculative_num_steps", None)
    drafts = 0 if steps is None else count("--speculative-num-steps", steps)
    if str(algorithm).upper() not in SGLANG_HEADS or not 0 < drafts <= MODELLED_DRAFTS:
        line.unmodelled.append(f"speculative_algorithm {algorithm}")
        return
    line.settings["num_speculative_tokens"] = drafts
    for name in ("speculative_eagle_topk", "speculative_num_draft_tokens"):
        if name in flags:
            table[name] = count(_spelt(name), _given(name, flags.pop(name)))


def read_trtllm(flags: Sequence[Flag]) -> ServeLine:
    """Return the engine that ``trtllm-serve`` starts with ``flags``."""
    line = ServeLine(engine="trtllm", settings={"backend": "trtllm", "block_size": TRTLLM_BLOCK})
    for name, value in flags:
        if name in ("", "model"):
            line.settings.setdefault("model", _model(value))
        elif name in OF_TRTLLM:
            line.settings[OF_TRTLLM[name]] = _given(name, value)
        else:
            line.leave_out(name)
    return line


# -- values ---------------------------------------------------------------------------------------------------------------


def _spelt(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _given(name: str, value: str | None) -> str:
    if not value:
        raise KvyardError(f"{_spelt(name)} has no value in the command line")
    return value


def _count_of_vllm(value: str) -> str:
    """Return a number with vLLM's binary suffixes written out: 32K is 32,768 there, and 32k is 32,000."""
    matched = re.fullmatch(r"(\d+)([KMG])", value)
    return value if matched is None else str(int(matched[1]) * BINARY[matched[2]])


def _model(value: str | None) -> str:
    """Return the preset of a model's name on the hub, or the name if it has none."""
    if value is None:
        raise KvyardError("the command line names no model: write it first, as in vllm serve MODEL")
    return hub_preset(value) or value


def _table(name: str, value: str | None) -> dict[str, Any]:
    try:
        return msgspec.json.decode(value or "", type=dict[str, Any])
    except DECODE_ERRORS as error:
        raise KvyardError(f"{_spelt(name)} is no JSON object: {error}") from None


def _number_or_text(value: str | None) -> object:
    return int(value) if value is not None and value.isdecimal() else value


def _member(name: str, value: str | None, kind: Any) -> object:
    """Return a value of one of SGLang's own settings."""
    if kind is bool:
        return (value or "true").lower() == "true"
    kinds = get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    try:
        return msgspec.convert(_given(name, value), next(one for one in kinds if one is not type(None)), strict=False)
    except DECODE_ERRORS as error:
        raise KvyardError(f"{_spelt(name)} is {value!r}: {error}") from None
