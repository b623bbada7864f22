"""``kvyard hunt`` with a real vLLM: what it finds is met again by its script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
CASES = json.loads((Path(__file__).parent / "hunt_cases.json").read_text())
"""Findings on 0.32, findings of earlier versions that 0.32 doesn't have, and a case that preempts a lot and is healthy."""
RUN = """
import json
import sys
from kvyard.vllm.hunt import ENGINE

ENGINE.import_engine()
cases = json.load(sys.stdin)
print(json.dumps([(ENGINE.run({**ENGINE.plain, **case})[0] or {"kind": None})["kind"] for case in cases]))
"""


def test_findings_are_met_again_and_healthy_cases_are_not_called_findings() -> None:
    python = os.environ.get("KVYARD_VLLM_PYTHON")
    if not python:
        pytest.skip("needs a real vLLM: set KVYARD_VLLM_PYTHON to a Python that has it (make peers ARGS=vllm)")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}
    text = json.dumps([each["case"] for each in CASES.values()])
    done = subprocess.run([python, "-c", RUN], input=text, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert dict(zip(CASES, found, strict=True)) == {name: each["kind"] for name, each in CASES.items()}


def test_a_failed_load_that_is_offered_again_stops_vllm_0_32(tmp_path: Path) -> None:
    """A request whose background load failed counts itself among those that room is kept for, and is never admitted."""
    python = os.environ.get("KVYARD_VLLM_PYTHON")
    if not python:
        pytest.skip("needs a real vLLM: set KVYARD_VLLM_PYTHON to a Python that has it (make peers ARGS=vllm)")
    command = [
        sys.executable,
        "-m",
        "kvyard",
        "hunt",
        "--python",
        python,
        "--seconds",
        "90",
        "--out",
        tmp_path,
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    found = {each["finding"]["kind"]: each["script"] for each in json.loads(done.stdout)["findings"]}
    again = subprocess.run([python, tmp_path / found["stuck"]], capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "steps scheduled nothing" in again.stdout
