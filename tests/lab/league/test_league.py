"""A league is the replays it is made of: standings, means over seeds, the front, and what is overloaded."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from statistics import fmean

import pytest
from tests.replay.traces.support import CONVERSATION

from kvyard.errors import KvyardError
from kvyard.lab.league import League, league
from kvyard.lab.league.page import DRAWN
from kvyard.replay import replay

SMALL = {"limit": 40, "workers": 2, "num_gpu_blocks": 1500}
POLICIES = ("round-robin", "kv", "least-time")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> League:
    folder = tmp_path_factory.mktemp("league")
    return league(CONVERSATION, folder=folder, policies=POLICIES, seeds=(0, 1), jitters=("0", "3s"), **SMALL)


def test_standings_are_the_replays(played: League) -> None:
    assert list(played.cells) == ["1x load, as recorded", "1x load, ticks spread over 3s"]
    for jitter, (_, standings) in zip(("0", "3s"), played.cells.items(), strict=True):
        assert sorted(one.policy for one in standings) == sorted(POLICIES)
        for one in standings:
            runs = [
                replay(CONVERSATION, router=one.policy, seed=seed, jitter=jitter, **SMALL).report for seed in (0, 1)
            ]
            assert one.figures["ttft_p99_ms"] == fmean(run.latency["ttft"].p99 for run in runs)
            assert one.figures["reuse"] == fmean(run.reuse["all"].value for run in runs)
            times = [run.latency["ttft"].mean for run in runs]
            assert one.spread == max(times) - min(times)


def test_first_is_the_soonest_and_the_front_has_nobody_above_it(played: League) -> None:
    for standings in played.cells.values():
        times = [one.figures["ttft_mean_ms"] for one in standings]
        assert times == sorted(times) and standings[0].front
        for one in standings:
            better = [
                other
                for other in standings
                if other is not one
                and other.figures["ttft_mean_ms"] <= one.figures["ttft_mean_ms"]  # type: ignore[operator]
                and other.figures["itl_p99_ms"] <= one.figures["itl_p99_ms"]  # type: ignore[operator]
                and other.figures != one.figures
            ]
            assert one.front == (not better)


def test_files_say_the_same(played: League) -> None:
    table, data, page = (path.read_text() for path in played.save())
    rows = list(csv.DictReader(table.splitlines()))
    assert len(rows) == len(POLICIES) * 2
    told = json.loads(data)
    assert told["kind"] == "kvyard league" and len(told["standings"]) == len(rows)
    for row, one in zip(rows, told["standings"], strict=True):
        assert float(row["ttft_mean_ms"]) == one["ttft_mean_ms"] and row["policy"] == one["policy"]
    assert all(name in page for name in POLICIES) and "ticks spread over 3s" in page
    assert page.count("data-figure=") == len(DRAWN) * len(played.cells)


def test_a_queue_that_decides_is_said(tmp_path: Path) -> None:
    found = league(CONVERSATION, folder=tmp_path, policies=["kv"], loads=(1, 400), limit=60, workers=8)
    assert found.overloaded == {"400x load, as recorded"}


@pytest.mark.parametrize(("axis", "told"), [("router", "--policies"), ("seed", "--seeds"), ("speedup", "--loads")])
def test_what_is_varied_is_not_set(axis: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(KvyardError, match=f"{axis} is what a league varies: say {told} instead"):
        league(CONVERSATION, folder=tmp_path, config={axis: "1"})


def test_an_unknown_policy_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(KvyardError, match="unknown routing policy 'nope'"):
        league(CONVERSATION, folder=tmp_path, policies=["kv", "nope"])
