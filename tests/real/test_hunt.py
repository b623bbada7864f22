"""``kvyard hunt`` with a real vLLM: what it finds is met again by its script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


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
