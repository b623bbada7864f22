"""A league is the replays it is made of: standings, means over seeds, the front, and what is overloaded."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from statistics import fmean

import pytest
from tests.replay.traces.support import CONVERSATION

from kvyard.errors import KvyardError
from kvyard.lab.league import DRAWN, Standing, advice, league, overloaded, standings
from kvyard.lab.study import Study
from kvyard.replay import replay
from kvyard.replay.report.slo import parse_limits

SMALL = {"limit": 40, "workers": 2, "num_gpu_blocks": 1500}
POLICIES = ("round-robin", "kv", "least-time")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = tmp_path_factory.mktemp("league")
    return league(CONVERSATION, folder=folder, policies=POLICIES, seeds=(0, 1), jitters=("0", "3s"), **SMALL)


def test_standings_are_the_replays(played: Study) -> None:
    assert list(standings(played)) == ["1x load", "1x load, ticks spread over 3s"]
    for jitter, (_, places) in zip(("0", "3s"), standings(played).items(), strict=True):
        assert sorted(one.policy for one in places) == sorted(POLICIES)
        for one in places:
            runs = [
                replay(CONVERSATION, router=one.policy, seed=seed, jitter=jitter, **SMALL).report for seed in (0, 1)
            ]
            assert one.values["ttft_p99"] == fmean(run.latency["ttft"].p99 for run in runs)
            assert one.values["reuse"] == fmean(run.reuse["all"].value for run in runs)
            times = [run.latency["ttft"].mean for run in runs]
            assert one.spread == max(times) - min(times)


def test_first_is_the_soonest_and_the_front_has_nobody_above_it(played: Study) -> None:
    for places in standings(played).values():
        times = [one.values["ttft_mean"] for one in places]
        assert times == sorted(times) and places[0].front
        for one in places:
            better = [
                other
                for other in places
                if other is not one
                and other.values["ttft_mean"] <= one.values["ttft_mean"]  # type: ignore[operator]
                and other.values["itl_p99"] <= one.values["itl_p99"]  # type: ignore[operator]
                and other.values != one.values
            ]
            assert one.front == (not better)


def test_files_say_the_same(played: Study) -> None:
    table, data, page = (path.read_text() for path in played.save())
    rows = list(csv.DictReader(table.splitlines()))
    assert len(rows) == len(POLICIES) * 2
    told = json.loads(data)
    assert told["kind"] == "kvyard league" and len(told["standings"]) == len(rows)
    for row, one in zip(rows, told["standings"], strict=True):
        assert float(row["ttft_mean_ms"]) == one["ttft_mean_ms"] and row["policy"] == one["policy"]
    assert all(name in page for name in POLICIES) and "ticks spread over 3s" in page
    assert page.count("data-figure=") == len(DRAWN) * len(standings(played))


def test_an_overloaded_table_is_marked(tmp_path: Path) -> None:
    found = league(CONVERSATION, folder=tmp_path, policies=["kv"], loads=(1, 400), limit=60, workers=8)
    assert overloaded(standings(found)) == {"400x load"}


def test_loads_whose_queues_decide_are_left_out_of_the_advice() -> None:
    def cell(**times: float) -> list[Standing]:
        queued = {"kv": 0.0, "mine": 0.0}
        places = [
            Standing(name, {"ttft_mean": ttft, "itl_p99": 1.0, "queue_mean": queued[name]}, 0.0, False, "")
            for name, ttft in times.items()
        ]
        return sorted(places, key=lambda one: one.values["ttft_mean"] or 0.0)

    calm, jammed = cell(kv=276.0, mine=237.0), cell(kv=100.0, mine=9000.0)
    assert advice({"a": calm, "b": jammed}).choice == "kv"
    stuck = [Standing("kv", {**jammed[0].values, "queue_mean": 90.0}, 0.0, False, ""), *jammed[1:]]
    said = advice({"a": calm, "b": stuck})
    assert said.choice == "mine" and "left out" in said.sentences[-1]
    assert advice({}).sentences == []


@pytest.mark.parametrize(("axis", "told"), [("router", "--policies"), ("seed", "--seeds"), ("speedup", "--loads")])
def test_axes_of_a_league_are_refused_as_settings(axis: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(KvyardError, match=f"{axis} is what a league varies: say {told} instead"):
        league(CONVERSATION, folder=tmp_path, config={axis: "1"})


def test_an_unknown_policy_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(KvyardError, match="unknown routing policy 'nope'"):
        league(CONVERSATION, folder=tmp_path, policies=["kv", "nope"])


def test_only_policies_that_keep_the_slo_are_recommended(tmp_path: Path) -> None:
    def place(policy: str, ttft: float, session: float) -> Standing:
        return Standing(
            policy, {"ttft_mean": ttft, "itl_p99": 1.0, "queue_mean": 0.0, "session_p90": session}, 0.0, False, ""
        )

    cells = {"1x": [place("quick", 100.0, 400e3), place("steady", 120.0, 290e3)]}
    limits = parse_limits("session_p90<5m")
    assert advice(cells).choice == "quick"
    found = advice(cells, limits)
    assert found.choice == "steady" and "1 of 2 policies keep session_p90" in found.sentences[-1]
    nobody = advice(cells, parse_limits("session_p90<1m"))
    assert not nobody.choice and "closest is steady: Session p90 is 4 min 50 s" in nobody.sentences[0]


def test_no_policy_is_recommended_by_the_requests_that_it_took() -> None:
    values = {"ttft_mean": 1.0, "itl_p99": 1.0, "queue_mean": 0.0, "rejected_share": 0.458}
    said = advice({"1x": [Standing("kv", values, 0.0, False, "")]})
    assert not said.choice
    assert said.sentences[0].startswith("No policy can be recommended: 45.80% of the requests are rejected")


def test_a_league_with_an_slo_says_who_meets_it(tmp_path: Path) -> None:
    played = league(CONVERSATION, folder=tmp_path, policies=["kv"], slo="ttft_p99<1ms", **SMALL)
    result = played.result()
    assert result.met is False and result.tables[0].rows[0].cells["SLO"] == "NOT met"
    assert "No policy of 1 meets the SLO (ttft_p99 ≤ 1 ms)" in result.advice[0]
    easy = league(CONVERSATION, folder=tmp_path / "easy", policies=["kv"], slo="ttft_p99<1h", **SMALL).result()
    assert easy.met and easy.tables[0].rows[0].cells["SLO"] == "met"
