"""From flat settings to one engine: its blocks, by number or from a model and a card; its timing; its lower tiers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvyard.blocks import GroupSpec
from kvyard.engine.config import DEFAULT_BLOCK_SIZE, EngineConfig, SpeculativeConfig
from kvyard.engine.models import plan, preset, presets, read_config
from kvyard.engine.timing import parse_timing
from kvyard.errors import KvyardError
from kvyard.tiers.config import OffloadConfig, TierConfig
from kvyard.tiers.links.config import LaneConfig, LinkConfig, parse_link_config

BYTES_PER_TOKEN = 131_072
"""Where nobody names a model: what Llama 3.1 8B keeps of a token (32 layers, 8 KV heads of 128, keys and values, bfloat16)."""
GB = 10**9
HOST_GB_S = 32
"""A link's speed, each way, where nobody says: about that of PCIe 5 to pageable memory, and the Dynamo mocker's."""
STORAGE_GB_S = 10
SHARED_GB_S = 80
STORAGE_LATENCY_NS = 100_000

AS_THEY_ARE = (
    "backend",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "scheduling_policy",
    "preemption_mode",
    "watermark",
    "eviction",
)
OF_A_BACKEND = ("sglang", "trtllm")
ONLY_WITH_MODEL = ("gpu_memory", "gpu_memory_utilization", "tensor_parallel_size", "kv_cache_dtype")
ONLY_WITHOUT_MODEL = ("groups", "bytes_per_token", "bytes_per_block")
CHOICES = {
    "backend": ("vllm", "sglang", "trtllm"),
    "scheduling_policy": ("fcfs", "priority"),
    "preemption_mode": ("newest", "oldest"),
    "host_scope": ("private", "shared"),
    "storage_scope": ("private", "shared"),
    "link_discipline": ("fair", "fifo"),
}


def engine_config(given: Mapping[str, Any], seed: int = 0) -> EngineConfig:
    """The engine of parsed settings. Raises ``KvyardError`` for what contradicts itself."""
    for name, choices in CHOICES.items():
        if name in given and given[name] not in choices:
            raise KvyardError(f"{name} is {given[name]!r}: choose one of {', '.join(choices)}")
    options: dict[str, Any] = {name: given[name] for name in AS_THEY_ARE if name in given}
    options |= _from_model(given) if "model" in given else _from_numbers(given)
    tiers = _tiers(given)
    if tiers is not None:
        if options.get("bytes_per_block") is None:
            raise KvyardError(
                "lower tiers need to know what a block takes: say model, or bytes_per_block beside groups"
            )
        options["tiers"] = tiers
    if "num_speculative_tokens" in given:
        options["speculative"] = SpeculativeConfig(num_speculative_tokens=given["num_speculative_tokens"])
    timing = parse_timing(given.get("timing", "polynomial"), given.get("timing_speedup", 1.0))
    fields = {"timing": timing, "seed": seed, **options}
    for name in OF_A_BACKEND:
        if name in given:
            fields[name] = _table(name, given[name])
    config = EngineConfig(**fields)
    config.check()
    return config


def _table(name: str, value: object) -> object:
    """Settings of one backend, which come as a table."""
    kind = next(field.type for field in msgspec.structs.fields(EngineConfig) if field.name == name)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise KvyardError(f"{name} can't be read: {error}") from None


def _from_numbers(given: Mapping[str, Any]) -> dict[str, Any]:
    for name in ONLY_WITH_MODEL:
        if name in given:
            raise KvyardError(f"{name} is for a model: say which, as in model=llama-3.1-8b, or leave it out")
    options: dict[str, Any] = {"num_gpu_blocks": given.get("num_gpu_blocks", 16384)}
    if "bytes_per_block" in given:
        if "bytes_per_token" in given:
            raise KvyardError("bytes_per_token and bytes_per_block say the same: give one of the two")
        options["bytes_per_block"] = given["bytes_per_block"]
    if "groups" in given:
        if "block_size" in given:
            raise KvyardError("block_size is for models with one group: leave it out, each of groups has its own")
        if "bytes_per_token" in given:
            raise KvyardError("bytes_per_token is for models with one group: say bytes_per_block beside groups")
        try:
            options["groups"] = msgspec.convert(given["groups"], tuple[GroupSpec, ...])
        except msgspec.ValidationError as error:
            raise KvyardError(f"groups can't be read: {error}") from None
        return options
    size = given.get("block_size", DEFAULT_BLOCK_SIZE[given.get("backend", "vllm")])
    if size < 1:
        raise KvyardError(f"block_size must be at least 1, got {size}")
    options["block_size"] = size
    options.setdefault("bytes_per_block", size * given.get("bytes_per_token", BYTES_PER_TOKEN))
    if options["bytes_per_block"] < 1:
        raise KvyardError(f"a block takes {options['bytes_per_block']} bytes: it must be at least 1")
    return options


def _from_model(given: Mapping[str, Any]) -> dict[str, Any]:
    for name in ONLY_WITHOUT_MODEL:
        if name in given:
            raise KvyardError(f"{name} follows from the model: leave one of the two out")
    if ("gpu_memory" in given) == ("num_gpu_blocks" in given):
        raise KvyardError(
            "how many blocks has a worker? Beside model say gpu_memory, such as 80GiB, or num_gpu_blocks, and not both"
        )
    name = given["model"]
    found = read_config(name) if name not in presets() and Path(name).exists() else preset(name)
    names = {
        *("gpu_memory_utilization", "tensor_parallel_size", "block_size", "kv_cache_dtype", "max_model_len"),
        *("max_num_batched_tokens", "max_num_seqs", "enable_prefix_caching"),
    }
    # Where the blocks are given, the card is as large as it has to be.
    made = plan(found, given.get("gpu_memory", 2**60), **{key: given[key] for key in given if key in names})
    options = made.engine_options()
    options["groups"] = made.groups
    if "num_gpu_blocks" in given:
        options["num_gpu_blocks"] = given["num_gpu_blocks"]
    return options


def _tiers(given: Mapping[str, Any]) -> OffloadConfig | None:
    host, storage = _room(given, "host"), _room(given, "storage")
    if host is None:
        named = [name for name in given if name.startswith(("host_", "storage_", "link", "offload_", "shared_"))]
        named += [name for name in ("min_uses", "on_unclean", "blocks_per_chunk", "last_block") if name in given]
        if named:
            raise KvyardError(f"{named[0]} is about lower tiers: say host_blocks or host_bytes, or leave it out")
        return None
    if not host:
        if storage:
            raise KvyardError("storage stands behind host memory: say host_blocks or host_bytes above 0 too")
        return None
    options: dict[str, Any] = {
        name.replace("offload_policy", "policy"): given[name]
        for name in (
            *(
                "offload_policy",
                "min_uses",
                "offload_ahead",
                "on_unclean",
                "blocks_per_chunk",
                "offload_batch_size",
                "last_block",
            ),
        )
        if name in given
    }
    if storage:
        latency = given.get("storage_latency", STORAGE_LATENCY_NS)
        scope = given.get("storage_scope", "private")
        link = _link(given, given.get("storage_bandwidth", (STORAGE_GB_S * GB,) * 2), latency, scope)
        options["storage"] = TierConfig(**storage, link=link, scope=scope)
    scope = given.get("host_scope", "private")
    return OffloadConfig(
        host=TierConfig(**host, link=_host_link(given, scope), scope=scope, eviction=given.get("host_eviction", "lru")),
        **options,
    )


def _room(given: Mapping[str, Any], tier: str) -> dict[str, Any] | None:
    """The capacity of a tier as ``TierConfig`` takes it; empty for none, ``None`` where nobody asked for it."""
    blocks, nbytes = given.get(f"{tier}_blocks"), given.get(f"{tier}_bytes")
    if blocks is not None and nbytes is not None:
        raise KvyardError(f"{tier}_blocks and {tier}_bytes say the same: give one of the two")
    if blocks is None and nbytes is None:
        return None
    for name, value in (("blocks", blocks), ("bytes", nbytes)):
        if value is not None and value < 0:
            raise KvyardError(f"{tier}_{name} is {value}: it can't be negative; 0 is none")
    if not blocks and not nbytes:
        return {}
    return {"num_blocks": blocks} if blocks is not None else {"bytes": nbytes or 0}


def _host_link(given: Mapping[str, Any], scope: str) -> LinkConfig:
    if "link" in given:
        for name in ("host_bandwidth", "host_latency", "link_discipline"):
            if name in given:
                raise KvyardError(f"link and {name} both describe the way to host memory: give one of the two")
        return parse_link_config(str(given["link"]))
    return _link(given, given.get("host_bandwidth", (HOST_GB_S * GB,) * 2), given.get("host_latency", 0), scope)


def _link(given: Mapping[str, Any], speed: tuple[int | None, int | None], latency: int, scope: str) -> LinkConfig:
    """A worker's own link, or its share of a link that all use."""
    together = given.get("shared_bandwidth", (SHARED_GB_S * GB,) * 2)
    lanes = [
        LaneConfig(client_bandwidth=own, bandwidth=both, first_byte_ns=latency)
        if scope == "shared"
        else LaneConfig(bandwidth=own, first_byte_ns=latency)
        for own, both in zip(speed, together)
    ]
    return LinkConfig(discipline=given.get("link_discipline", "fair"), outward=lanes[0], inward=lanes[1])
