"""Timing kinds by name: how they are written in one word, and one from outside the package, replayed with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

import kvyard
from kvyard.engine.timing import FixedTiming, PolynomialTiming, parse_timing, timing_choices
from kvyard.engine.timing.deployment import Deployment
from kvyard.errors import KvyardError

HALF = """
from kvyard.engine.timing import TimingConfig, make_timing


class HalfTiming(TimingConfig, frozen=True, kw_only=True, tag="half"):
    prefill_ms: float
    decode_ms: float

    def model(self, capacity_tokens):
        return make_timing(
            {"kind": "fixed", "prefill_ms": self.prefill_ms / 2, "decode_ms": self.decode_ms / 2}, capacity_tokens
        )
"""


def test_a_word_is_a_name_and_the_values_of_its_fields():
    assert parse_timing("polynomial", 2.0) == PolynomialTiming(speedup_ratio=2.0)
    assert parse_timing("fixed:50,8") == FixedTiming(prefill_ms=50, decode_ms=8)
    for wrong in ("fixed", "fixed:50", "fixed:50,x", "fixed:1,2,3"):
        with pytest.raises(KvyardError, match=f"^timing is '{wrong}': write fixed:PREFILL_MS,DECODE_MS$"):
            parse_timing(wrong)
    with pytest.raises(KvyardError, match=r"^timing is 'polynomial:3': write polynomial$"):
        parse_timing("polynomial:3")


def test_the_choices_are_those_of_the_registry():
    assert timing_choices() == (
        "polynomial, fixed:PREFILL_MS,DECODE_MS, profile:NAME, roofline (with model and gpu), "
        "or tables or tables:FOLDER (with model and gpu)"
    )
    with pytest.raises(KvyardError, match=f"^timing is 'guess': choose {re.escape(timing_choices())}$"):
        parse_timing("guess")


@pytest.mark.slow
def test_a_kind_from_an_installed_package_is_replayed_with(tmp_path):
    (tmp_path / "half_pack.py").write_text(HALF)
    info = tmp_path / "half_pack-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: half-pack\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvyard.timing]\nhalf = half_pack:HalfTiming\nbroken = half_pack:Nothing\n")
    (tmp_path / "half.toml").write_text('timing = "half:40,10"\n')
    (tmp_path / "trace.jsonl").write_text(
        "".join(
            json.dumps({"timestamp": at, "input_length": 600, "output_length": 5, "hash_ids": [2 * at, 2 * at + 1]})
            + "\n"
            for at in range(4)
        )
    )

    def run(*words):
        paths = os.pathsep.join([str(tmp_path), str(Path(kvyard.__file__).parents[1])])
        done = subprocess.run(
            [sys.executable, "-m", "kvyard", "replay", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "half:PREFILL_MS,DECODE_MS, or broken" in " ".join(run("--help").split())
    found = []
    for name, choice in (("flag", ["--timing", "half:40,10"]), ("file", ["--config", "half.toml"])):
        run("trace.jsonl", "--workers", "1", "-q", "--report", f"{name}.json", *choice)
        found.append(json.loads((tmp_path / f"{name}.json").read_text()))
    run("trace.jsonl", "--workers", "1", "-q", "--report", "plain.json", "--timing", "fixed:20,5")
    plain = json.loads((tmp_path / "plain.json").read_text())
    for report in found:
        assert report["latency"] == plain["latency"]
        assert report["config"]["workers"][0]["engine"]["timing"]["kind"] == "half"


def test_a_deployment_in_words() -> None:
    plain = Deployment(model="/models/llama-3-8b", gpu="h100")
    assert str(plain) == "llama-3-8b on h100"
    split = replace(plain, tensor_parallel_size=2, data_parallel_size=4, enable_expert_parallel=True)
    assert (
        str(replace(split, weight_dtype="fp8", kv_cache_dtype="fp8"))
        == "llama-3-8b on h100 TP2 DP4 EP fp8 weights fp8 cache"
    )
