"""A backend is put together from parts: one from an installed package is chosen by name, in a replay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvyard

PACKAGE = """
from kvyard.engine.policies.backend import SchedulerBackend
from kvyard.engine.policies.mixed import FitsNow, MixedPasses
from kvyard.engine.queue import make_queue


def shortest(running):
    return min(running.values(), key=lambda job: (job.output, job.serial))


def policy(jobs, config):
    return MixedPasses(jobs, config, FitsNow(jobs, config.scheduler_reserve_full_isl), shortest)


LENIENT = SchedulerBackend(
    block_size=16, check=lambda config: config.check_token_budget(), queue=lambda config: make_queue("fcfs"), policy=policy
)
"""


@pytest.mark.slow
def test_one_from_an_installed_package_is_replayed_with(tmp_path):
    (tmp_path / "lenient_pack.py").write_text(PACKAGE)
    info = tmp_path / "lenient_pack-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lenient-pack\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvyard.backends]\nlenient = lenient_pack:LENIENT\n")
    (tmp_path / "trace.jsonl").write_text(
        "".join(
            json.dumps({"timestamp": at, "input_length": 300, "output_length": 200, "hash_ids": [at]}) + "\n"
            for at in range(6)
        )
    )

    def run(*words):
        paths = os.pathsep.join([str(tmp_path), str(Path(kvyard.__file__).parents[1])])
        done = subprocess.run(
            [sys.executable, "-m", "kvyard", "replay", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "vllm, sglang, trtllm or lenient" in " ".join(run("--list-settings").split())
    found = {}
    for backend in ("lenient", "vllm"):
        tight = ["--workers", "1", "--block-size", "16", "--num-gpu-blocks", "80", "--set", f"backend={backend}"]
        run("trace.jsonl", "-q", "--report", "r.json", *tight)
        found[backend] = json.loads((tmp_path / "r.json").read_text())
    assert found["lenient"]["config"]["workers"][0]["engine"]["backend"] == "lenient"
    assert found["lenient"]["preemptions"] > 0 < found["vllm"]["preemptions"]
    assert found["lenient"]["latency"] != found["vllm"]["latency"], "another is preempted"
