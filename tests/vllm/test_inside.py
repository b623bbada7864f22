"""A real vLLM with kvyard's block manager answers as one with its own: token for token, event for event."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3600)]


def vllm_python() -> str:
    python = os.environ.get("KVYARD_VLLM_PYTHON")
    if not python:
        pytest.skip("needs a real vLLM: set KVYARD_VLLM_PYTHON to a Python that has it (make peers ARGS=vllm)")
    return python


def test_every_family_of_scheduling_is_the_same_over_both_managers() -> None:
    done = subprocess.run(
        [vllm_python(), ROOT / "scripts/compare_managers.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert done.stdout.count(", identical") >= 71


@pytest.mark.parametrize("model", ["dense", "hybrid"])
def test_tokens_hits_and_events_are_vllms_and_broken_managers_show(model: str, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [vllm_python(), ROOT / "scripts/inside_vllm.py", "--models", model, "--mutants", "--json", figures],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    found = json.loads(figures.read_text())[model]
    assert found["requests"] == 1000
    assert found["control"] == found["kvyard"] == []
    # The run has to have had in it what it is about.
    assert min(found["evicted"], found["cached tokens"]) > 1000
    assert min(found["preempted"], found["chunked"]) >= 20
    # So does the model: else its tokens could show nothing.
    assert found["answers that an early token changes"] > 0.9
    # Each broken manager is caught, and by what a client can see, not only by what the model runner was told.
    assert len(found["mutants"]) == (5 if model == "dense" else 6)
    for name, differs in found["mutants"].items():
        assert set(differs) & {"tokens", "cached", "events", "error"}, name
