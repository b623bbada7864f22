"""Impossible fleets, and the ports of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.server.mock.support import ENGINE

from kvyard.engine.config import EngineConfig
from kvyard.engine.models import preset
from kvyard.errors import KvyardError
from kvyard.server.mock.config import MockConfig, make_config


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"workers": 0}, "workers"),
        ({"speed": 0}, "speed"),
        ({"replay_endpoint": "tcp://*:5558"}, "events endpoint"),
        ({"events_endpoint": "ipc:///tmp/x", "dp_size": 2}, "rank 1"),
        ({"events_endpoint": "nonsense"}, "not an endpoint"),
        ({"events_endpoint": "tcp://*:65534", "workers": 3}, "port"),
        ({"events_endpoint": "tcp://h:1", "events_connect": True, "workers": 2}, "{worker}"),
        ({"tool_call_rate": 2}, "tool_call_rate"),
    ],
)
def test_impossible_fleets_are_refused(given_: dict[str, Any], words: str) -> None:
    with pytest.raises(KvyardError, match=words):
        MockConfig(engine=EngineConfig(**ENGINE), **given_).check()


def test_workers_and_ranks_have_ports_of_their_own() -> None:
    config = MockConfig(engine=EngineConfig(**ENGINE), workers=3, dp_size=2, events_endpoint="tcp://*:5557")
    assert [config.endpoint_of("tcp://*:5557", worker) for worker in range(3)] == [
        "tcp://*:5557",
        "tcp://*:5559",
        "tcp://*:5561",
    ]
    assert config.endpoint_of("tcp://127.0.0.1:0", 2) == "tcp://127.0.0.1:0"


def test_flat_settings_describe_a_fleet() -> None:
    made = make_config({"model": "llama-3.1-8b", "data_parallel_size": "2", "seed": 3, "speed": "2"})
    assert (made.served_model_name, made.dp_size, made.speed, made.engine.seed) == ("llama-3.1-8b", 2, 2.0, 3)
    assert made.engine.num_gpu_blocks == 16384
    plain = make_config({})
    assert (plain.served_model_name, plain.engine.block_size, plain.engine.max_model_len) == ("mock", 16, 32_768)
    with pytest.raises(KvyardError, match="did you mean max_num_seqs"):
        make_config({"max_num_seq": 1})


def test_a_mock_has_real_times_once_a_card_is_named() -> None:
    assert make_config({"model": "llama-3.1-8b"}).engine.timing.describe().startswith("Dynamo's default polynomial")
    real = make_config({"model": "llama-3.1-8b", "gpu": "h100", "tensor_parallel_size": 2, "timing": "roofline"})
    assert real.engine.timing.describe() == "roofline of llama-3.1-8b on h100 TP2, no measurement"
    experts = {"model": "qwen3-30b-a3b", "gpu": "h100", "data_parallel_size": 2, "enable_expert_parallel": True}
    assert "DP2 EP" in make_config({**experts, "timing": "roofline"}).engine.timing.describe()


def test_the_served_name_is_the_models(tmp_path: Path) -> None:
    folder = tmp_path / "Llama-3.1-8B"
    folder.mkdir()
    (folder / "config.json").write_bytes(msgspec.json.encode(preset("llama-3.1-8b")))
    (tmp_path / "mine.json").write_bytes(msgspec.json.encode(preset("llama-3.1-8b")))
    for model, name in (
        ("llama-3.1-8b", "llama-3.1-8b"),
        (folder, "Llama-3.1-8B"),
        (folder / "config.json", "Llama-3.1-8B"),
        (tmp_path / "mine.json", "mine"),
    ):
        assert make_config({"model": str(model)}).served_model_name == name
    assert make_config({"model": "llama-3.1-8b", "served_model_name": "it"}).served_model_name == "it"
