"""Whole traces with prefill and decode apart, against runs of Dynamo's replay that are kept in ``benchmarks/data``."""

from __future__ import annotations

import pytest
from benchmarks.handovers import CASES, FIGURES, kept, means, ours

pytestmark = pytest.mark.slow


def test_every_case_has_its_runs():
    rows = kept()
    assert set(rows) == {(case, router) for case in CASES for router in ("round-robin", "kv")}
    assert {len(runs) for (_, router), runs in rows.items() if router == "kv"} == {5}


@pytest.mark.parametrize("case", CASES)
def test_round_robin_finds_what_dynamo_finds(case):
    (theirs,) = kept()[case, "round-robin"]
    mine = ours(case, "round-robin", 0)
    assert {name: mine[name] for name in FIGURES} == pytest.approx(theirs, rel=0.001)


@pytest.mark.parametrize("case", CASES)
def test_kv_finds_what_dynamo_finds_on_average(case):
    """Means of five seeds against means of five runs, whose ties are drawn without one."""
    theirs = means(kept()[case, "kv"])
    mine = means([ours(case, "kv", seed) for seed in range(5)])
    for name in FIGURES:
        tolerance = 0.03 if name.endswith("p99") else 0.01
        assert mine[name] == pytest.approx(theirs[name], rel=tolerance), name
