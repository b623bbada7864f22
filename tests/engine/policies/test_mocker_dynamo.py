"""Both policies against NVIDIA Dynamo's mocker, 1,000 requests of a real trace on one worker."""

from __future__ import annotations

import json
import lzma
import os
import subprocess
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.engine.driving import Row, drive
from tests.peers import peer_python, why_not

from kvyard.engine.build import make_core
from kvyard.engine.config import read_engine_config
from kvyard.engine.policies.settings import SglangSettings
from kvyard.engine.watcher import Watcher

HERE = Path(__file__).parent
PEER = json.loads((HERE / "data" / "dynamo.json").read_text())
FAST = ["sglang", "sglang careless"]
"""The others are alike, and each costs a second."""
OTHERS = [name for name in PEER if name.startswith("sglang") and name not in FAST]
DYNAMO = peer_python("dynamo")


class Times(Watcher):
    def __init__(self) -> None:
        self.first: dict[str, int] = {}
        self.ends: dict[str, int] = {}

    def produced(self, job, count, end):
        self.first.setdefault(job.id, end)

    def ended(self, job, now, reason):
        self.ends[job.id] = now


@pytest.fixture(scope="module")
def rows():
    with lzma.open(HERE.parents[2] / "examples" / "data" / "mooncake_conversation.jsonl.xz", "rt") as lines:
        return [
            Row(row["timestamp"] * 1_000_000, row["input_length"], row["output_length"], tuple(row["hash_ids"]))
            for _, row in zip(range(1000), map(json.loads, lines), strict=False)
        ]


def ours(engine, rows):
    times = Times()
    core = make_core(read_engine_config(engine), watcher=times)
    jobs = drive(core, rows, check=False)
    core.check_integrity()
    count = len(rows)
    return {
        "mean_ttft_ms": sum(times.first[f"r{at}"] - row.arrival for at, row in enumerate(rows)) / count / 1e6,
        "mean_e2e_latency_ms": sum(times.ends[f"r{at}"] - row.arrival for at, row in enumerate(rows)) / count / 1e6,
        "duration_ms": max(times.ends.values()) / 1e6,
        "reuse": sum(job.cached_tokens for job in jobs) / sum(row.length for row in rows),
        "readmissions": core.scheduler.jobs.preemptions,
    }


def close(found, peer, share):
    for key in ("mean_ttft_ms", "mean_e2e_latency_ms", "duration_ms"):
        assert found[key] == pytest.approx(peer[key], rel=share), key


@pytest.mark.parametrize("name", [name for name in PEER if name.startswith("trtllm")])
def test_no_evict_is_the_same_to_the_nanosecond(name, rows):
    """The mocker's own rules, which are not TensorRT-LLM's."""
    found = ours(PEER[name]["engine"] | {"trtllm": {"mocker": True}}, rows)
    assert {key: round(value, 6) for key, value in found.items()} == PEER[name]["peer"]


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_sglang_is_within_two_percent(name, rows):
    """SGLang's own rules, which the mocker simplifies."""
    found = ours(PEER[name]["engine"], rows)
    close(found, PEER[name]["peer"], 0.02)
    assert found["reuse"] == pytest.approx(PEER[name]["peer"]["reuse"], abs=0.002)


@pytest.mark.parametrize("name", ["sglang", pytest.param("sglang small chunks", marks=pytest.mark.slow)])
def test_with_sampled_tokens_booked_first_tokens_come_at_the_same_time(name, rows):
    """The rule that differs, switched: what is left is beyond the microsecond."""
    engine = read_engine_config(PEER[name]["engine"])
    engine = replace(engine, sglang=replace(engine.sglang or SglangSettings(), books_sampled=True))
    found = ours(msgspec.to_builtins(engine), rows)
    assert found["mean_ttft_ms"] == pytest.approx(PEER[name]["peer"]["mean_ttft_ms"], abs=0.001)


@pytest.mark.slow
@pytest.mark.skipif(DYNAMO is None, reason=why_not("dynamo"))
@pytest.mark.parametrize("name", ["trtllm", "sglang", "sglang lpm"])
def test_the_peer_itself(name, rows):
    command = [DYNAMO, str(HERE / "record_dynamo.py"), "-", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "DYN_LOG": "error"})
    rules = {"trtllm": {"mocker": True}} if name == "trtllm" else {}
    close(ours(PEER[name]["engine"] | rules, rows), json.loads(done.stdout.splitlines()[-1]), 0.03)
