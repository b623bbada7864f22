"""Two real runs on an H200: a profile of the sweep and of run A's log predicts run B, which it hasn't seen."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from benchmarks.h200_engine import ROOFLINE, compared, fitted

from kvyard.lab.validate.compare import Validation


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "h200.json"
    path.write_bytes(msgspec.json.encode(fitted().profile))
    return path


def worst(found: Validation, kind: str) -> float:
    return max(abs(error) for error in found.latency[kind].error.values())


@pytest.mark.parametrize("run", ["A", "B"])
def test_a_profile_predicts_the_run_within_five_percent(profile: Path, run: str) -> None:
    found = compared(run, {"timing": f"profile:{profile}"})
    assert found.requests == 300
    # Half of run B's requests wait in a queue that comes and goes: which ones is decided by chance, and so is its median.
    assert abs(found.latency["ttft"].error.pop("p50")) < 0.08
    assert {kind: worst(found, kind) < 0.05 for kind in ("ttft", "tpot", "e2e")} == dict.fromkeys(
        ("ttft", "tpot", "e2e"), True
    )
    assert found.hit_share is not None
    assert found.hit_share.error == 0


@pytest.mark.parametrize("run", ["A", "B"])
def test_the_roofline_has_tokens_within_nine_percent(run: str) -> None:
    assert abs(compared(run, ROOFLINE).latency["tpot"].error["mean"]) < 0.09
