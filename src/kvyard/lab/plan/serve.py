"""Command lines that start the engines of a plan."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from kvyard.engine.models.fields import hub_names
from kvyard.lab.plan.search import FleetOption
from kvyard.replay.settings import make_config

EVENTS = '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
FLAGS = (
    *("max_model_len", "gpu_memory_utilization", "kv_cache_dtype", "quantization", "max_num_seqs"),
    *("max_num_batched_tokens", "pipeline_parallel_size", "block_size"),
)
"""Settings that vLLM has a flag of the same name for."""


def serve_commands(settings: Mapping[str, object], fleet: FleetOption) -> list[str]:
    """Return the command that starts one engine, for each role of the fleet."""
    config = make_config(settings)
    return [_vllm(settings, fleet, kind.engine.role) for kind in config.workers]


def _vllm(settings: Mapping[str, object], fleet: FleetOption, role: str) -> str:
    words = ["vllm", "serve", hub_name(str(settings["model"]))]
    words += ["--tensor-parallel-size", str(fleet.shape.tensor_parallel_size)]
    named = {**settings, "quantization": settings.get("weight_dtype")}
    for name in FLAGS:
        value = named.get(name)
        if value is not None and value != "auto":
            words += [f"--{name.replace('_', '-')}", str(value)]
    if settings.get("enable_expert_parallel"):
        words.append("--enable-expert-parallel")
    if fleet.shape.host_gib:
        words += ["--kv-offloading-size", str(fleet.shape.host_gib * fleet.shape.tensor_parallel_size)]
    words += ["--enable-prompt-tokens-details", "--kv-events-config", EVENTS]
    if fleet.prefill:
        words += ["--kv-transfer-config", f'{{"kv_connector": "NixlConnector", "kv_role": "{ROLES[role]}"}}']
    return shlex.join(words)


def hub_name(model: str) -> str:
    """Return the name under which a model is published; the name itself if that isn't known."""
    for hub, preset in hub_names().items():
        if model.lower() in (hub.lower(), preset):
            return hub
    return model
