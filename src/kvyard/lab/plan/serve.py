"""Command lines that start the engines of a plan."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from kvyard.engine.config import EngineConfig
from kvyard.engine.models.fields import Fields, find_config, hub_names
from kvyard.lab.plan.search import FleetOption
from kvyard.replay.settings import SETTINGS, make_config

EVENTS = '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
FLAGS = {
    "dp_size": "data_parallel_size",
    **{
        name: name
        for name in (
            *("max_model_len", "gpu_memory_utilization", "kv_cache_dtype", "quantization", "max_num_seqs"),
            *("max_num_batched_tokens", "pipeline_parallel_size", "block_size", "scheduling_policy"),
        )
    },
}
"""vLLM's flags by the setting that they stand for."""
QUANTIZED_AT_START = "fp8"
"""The type to which vLLM itself converts the weights of a checkpoint of 16 bits."""


def serve_commands(settings: Mapping[str, object], fleet: FleetOption) -> list[str]:
    """Return the command that starts one engine, for each role of the fleet; none if the engine isn't vLLM."""
    config = make_config(settings)
    if any(kind.engine.backend != "vllm" for kind in config.workers):
        return []
    return [_vllm(settings, fleet, kind.engine) for kind in config.workers]


def serve_notes(settings: Mapping[str, object], fleet: FleetOption) -> list[str]:
    """Return what to know before the commands work."""
    given = SETTINGS.parse(settings)
    if (engine := given.get("backend", "vllm")) != "vllm":
        return [f"kvyard knows the command line of vLLM alone: start {engine} with the settings of plan.toml"]
    notes = []
    own = Fields(find_config(str(given["model"]))).integer("max_position_embeddings")
    if given.get("max_model_len", 0) > own:
        notes.append(
            f"--max-model-len is beyond the model's {own:,} tokens: vLLM wants VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 in its "
            "environment, and the model a RoPE scaling that its authors recommend (--hf-overrides)"
        )
    weights = given.get("weight_dtype", "bf16")
    if weights not in ("bf16", QUANTIZED_AT_START):
        notes.append(f"name a checkpoint whose weights are {weights}: vLLM takes the type from its config")
    if fleet.prefill:
        notes.append("on several hosts, set VLLM_NIXL_SIDE_CHANNEL_HOST to each engine's own address")
    return notes


def _vllm(settings: Mapping[str, object], fleet: FleetOption, engine: EngineConfig) -> str:
    given = SETTINGS.parse(settings)
    words = ["vllm", "serve", hub_name(str(settings["model"]))]
    words += ["--tensor-parallel-size", str(fleet.shape.tensor_parallel_size)]
    if given.get("weight_dtype") == QUANTIZED_AT_START:
        given["quantization"] = QUANTIZED_AT_START
    for name, flag in FLAGS.items():
        value = given.get(name)
        if value is not None and value != "auto":
            words += [f"--{flag.replace('_', '-')}", str(value)]
    if given.get("enable_expert_parallel"):
        words.append("--enable-expert-parallel")
    host = _host_bytes(engine)
    if host and not fleet.prefill:
        words += ["--kv-offloading-size", f"{host / (1 << 30):g}"]
    words += ["--enable-prompt-tokens-details", "--kv-events-config", EVENTS]
    if fleet.prefill:
        words += ["--kv-transfer-config", json.dumps(_transfer(engine.role, host))]
    return shlex.join(words)


def _transfer(role: str, host: int) -> dict[str, Any]:
    """Return vLLM's connector of a role. ``--kv-offloading-size`` would replace it, so host memory stands beside it."""
    handover: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": ROLES[role]}
    if not host:
        return handover
    offload = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": host},
    }
    both = {"connectors": [handover, offload]}
    return {"kv_connector": "MultiConnector", "kv_role": ROLES[role], "kv_connector_extra_config": both}


def _host_bytes(engine: EngineConfig) -> int:
    """Return the bytes of host memory of an engine."""
    if engine.tiers is None:
        return 0
    tier = engine.tiers.tiers[0]
    return tier.bytes if tier.bytes is not None else (tier.num_blocks or 0) * (engine.bytes_per_block or 0)


def hub_name(model: str) -> str:
    """Return the name under which a model is published; the name itself if that isn't known."""
    for hub, preset in hub_names().items():
        if model.lower() in (hub.lower(), preset):
            return hub
    return model
