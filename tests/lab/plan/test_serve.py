"""Command lines of a plan: flags of vLLM alone, and only what it starts with."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from kvyard.lab.plan.search import FleetOption
from kvyard.lab.plan.serve import serve_commands, serve_notes
from kvyard.lab.plan.shape import Shape

BASE: dict[str, Any] = {"model": "Qwen/Qwen3-32B"}


def fleet(prefill: int = 0, **more: Any) -> FleetOption:
    return FleetOption("", {}, shape=Shape("h100", 2, **more), workers=3, prefill=prefill)


def flags(line: str) -> dict[str, str]:
    """The flags of a command with their values."""
    words = shlex.split(line)
    assert words[:2] == ["vllm", "serve"]
    return {
        word: "" if following.startswith("--") else following
        for word, following in zip(words[3:], [*words[4:], "--"], strict=True)
        if word.startswith("--")
    }


def lines(option: FleetOption, **base: Any) -> list[dict[str, str]]:
    return [flags(line) for line in serve_commands({**BASE, **base, **option.settings()}, option)]


def test_what_was_set_is_a_flag_with_its_value() -> None:
    (line,) = lines(fleet(), max_num_seqs="1k", dp_size=2, pipeline_parallel_size=2, host_bytes="10GiB")
    wanted = {
        "--tensor-parallel-size": "2",
        "--data-parallel-size": "2",
        "--pipeline-parallel-size": "2",
        "--max-num-seqs": "1000",
        "--kv-offloading-size": "10",
    }
    assert {name: line[name] for name in wanted} == wanted
    assert "--max-model-len" not in line


@pytest.mark.parametrize(("weights", "flag"), [("fp8", "fp8"), ("awq", None), ("bf16", None)])
def test_vllm_converts_weights_to_fp8_alone(weights: str, flag: str | None) -> None:
    (line,) = lines(fleet(), weight_dtype=weights)
    assert line.get("--quantization") == flag
    notes = serve_notes({**BASE, "weight_dtype": weights}, fleet())
    assert bool(notes) == (weights == "awq")


def test_host_memory_stands_beside_the_connector_of_a_split() -> None:
    plain = lines(fleet(prefill=1))
    assert [json.loads(line["--kv-transfer-config"]) for line in plain] == [
        {"kv_connector": "NixlConnector", "kv_role": role} for role in ("kv_producer", "kv_consumer")
    ]
    both = lines(fleet(prefill=1, host_gib=8))
    assert not any("--kv-offloading-size" in line for line in both), "it would replace the connector"
    found = json.loads(both[0]["--kv-transfer-config"])["kv_connector_extra_config"]["connectors"]
    assert [part["kv_connector"] for part in found] == ["NixlConnector", "OffloadingConnector"]
    assert found[1]["kv_connector_extra_config"] == {"cpu_bytes_to_use": 16 << 30}


def test_a_length_beyond_the_models_own_is_noted() -> None:
    assert not serve_notes({**BASE, "max_model_len": 40960}, fleet())
    assert any("40,960 tokens" in note for note in serve_notes({**BASE, "max_model_len": 100_000}, fleet()))


def test_another_engine_has_no_line_of_vllm() -> None:
    settings = {**BASE, "backend": "sglang", **fleet().settings()}
    assert serve_commands(settings, fleet()) == []
    assert any("start sglang" in note for note in serve_notes(settings, fleet()))
