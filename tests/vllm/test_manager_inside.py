"""A real vLLM with kvyard's block manager answers as one with its own, and what is recorded of it can be replayed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
    assert done.stdout.count(", identical") >= 128


def test_a_manager_that_comes_to_no_end_is_named() -> None:
    """kvyard's manager is made to look for blocks for ever."""
    program = (
        "import sys; sys.path[0:0] = ['scripts']; import compare_managers; from kvyard.vllm.manager import Manager; "
        "Manager.allocate_slots = lambda *_, **__: all(True for _ in iter(int, 1)); "
        "sys.argv = ['x', '--seconds', '20', 'swa']; sys.exit(compare_managers.main())"
    )
    done = subprocess.run(
        [vllm_python(), "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 1, done.stderr[-2000:]
    assert "kvyard's manager came to no end in 20 s" in done.stdout


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
    assert found["control"] == found["kvyard"] == found["recorded"] == []
    # The run has to have had in it what it is about.
    assert min(found["evicted"], found["cached tokens"]) > 1000
    assert min(found["preempted"], found["chunked"]) >= 10
    # So does the model: else its tokens could show nothing.
    assert found["answers that an early token changes"] > 0.9
    # Each broken manager is caught, and by what a client can see, not only by what the model runner was told.
    assert len(found["mutants"]) == (5 if model == "dense" else 6)
    for name, differs in found["mutants"].items():
        assert set(differs) & {"tokens", "cached", "events", "error"}, name


def record(out: Path, blocks: int, *more: str) -> tuple[Path, float]:
    """Serve with so many blocks; returns the recording, and the share of the prompts' tokens that were found cached."""
    done = subprocess.run(
        [vllm_python(), ROOT / "scripts/record_inside.py", out, "--blocks", str(blocks), "--give-up", *more],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    (folder,) = out.iterdir()
    rows = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    return folder, sum(row["cached"] for row in rows) / sum(row["input_length"] for row in rows)


def kvyard(*args: str | Path) -> str:
    done = subprocess.run([sys.executable, "-m", "kvyard", *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_recording_conforms_and_its_replay_says_what_twice_the_cache_would_do(tmp_path: Path) -> None:
    recording, measured = record(tmp_path / "once", 97)
    twice_recording, twice_measured = record(tmp_path / "twice", 193)
    said = kvyard("conform", recording / "decisions.jsonl.gz", twice_recording / "decisions.jsonl.gz")
    assert "2 of 2 logs identical" in said
    profile = tmp_path / "profile.json"
    kvyard("calibrate", "--from", recording / "passes.jsonl", "-o", profile)
    predicted = []
    for blocks in (96, 192):
        report = tmp_path / f"report-{blocks}.json"
        settings = ["--num-gpu-blocks", str(blocks), "--block-size", "32", "--max-model-len", "1024"]
        settings += ["--max-num-seqs", "16", "--max-num-batched-tokens", "192", "--timing", f"profile:{profile}"]
        settings += ["--workers", "1", "--router", "round-robin", "--set", "async_scheduling=false"]
        kvyard("replay", recording / "trace.jsonl", *settings, "-q", "--report", report)
        predicted.append(json.loads(report.read_text())["reuse"]["all"]["value"])
    assert twice_measured > measured + 0.05
    assert predicted == pytest.approx([measured, twice_measured], abs=0.03)


def test_decisions_conform_where_all_clients_give_up_after_a_step(tmp_path: Path) -> None:
    recording, _ = record(tmp_path / "out", 97, "--give-up-all-after", "40")
    assert "1 of 1 logs identical, 40 steps" in kvyard("conform", recording / "decisions.jsonl.gz")
    assert json.loads((recording / "summary.json").read_text())["decisions"] == 40
