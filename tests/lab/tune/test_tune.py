"""Searches: what they find against all there is, the same again, going on after an interrupt, and what is written."""

from __future__ import annotations

import csv
import json
import tomllib
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tests.replay.traces.support import CONVERSATION

from kvyard.errors import KvyardError
from kvyard.lab.jobs import LocalExecutor, Task
from kvyard.lab.tune import Prices, Tuned, parse_goals, parse_limits, tune
from kvyard.lab.tune.parts import cut
from kvyard.replay import replay
from kvyard.replay.traces import open_trace

BASE: dict[str, Any] = {"limit": 60, "block_size": 512, "num_gpu_blocks": 512}
SEARCH = "router=round-robin|kv,host_bytes=1GiB..3GiB,workers=2..5"
PRICES = Prices(card=1.0, host=0.3)


def searched(folder: Path, goal: str = "min cost", slo: str | None = "ttft_p99=2800", **more: Any) -> Tuned:
    options: dict[str, Any] = {"trials": 8, "prices": PRICES, "search": SEARCH, **BASE, **more}
    return tune(CONVERSATION, goals=parse_goals(goal), limits=parse_limits(slo), folder=folder, **options)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    return searched(tmp_path_factory.mktemp("tune"))


class Everything:
    """All points of ``SEARCH`` on the part that is searched on: the slow and obvious way."""

    def __init__(self) -> None:
        source = open_trace(CONVERSATION, limit=60)
        part = cut(source, 0.3).train
        self.figures: dict[tuple[str, int, int], dict[str, float]] = {}
        for router, gib, workers in product(("round-robin", "kv"), (1, 2), range(2, 6)):
            settings = {**BASE, "router": router, "host_bytes": f"{gib}GiB", "workers": workers}
            del settings["limit"]
            report = replay(part.of(source), **settings).report
            self.figures[router, gib, workers] = {
                "cost": workers * (1 + gib * 0.3),
                "ttft_p99": report.latency["ttft"].p99,
                "itl_p99": report.latency["itl"].p99,
                "reuse": report.reuse["all"].value,
            }


@pytest.fixture(scope="module")
def everything() -> dict[tuple[str, int, int], dict[str, float]]:
    return Everything().figures


def test_the_best_of_all_there_is(tmp_path: Path, everything: dict[tuple[str, int, int], dict[str, float]]) -> None:
    search = "router=round-robin|kv,host_bytes=1GiB|2GiB,workers=2..5"
    made = searched(tmp_path, search=search, trials=16)
    kept = {point: one for point, one in everything.items() if one["ttft_p99"] <= 2800}
    assert 0 < len(kept) < len(everything), "the limits tell points apart"
    cheapest = min(one["cost"] for one in kept.values())
    (best,) = made.best
    assert best.cost == pytest.approx(cheapest) and best is made.answer and made.met
    for one in made.trials:
        if one.state == "done":
            host = int(str(one.point["host_bytes"]).removesuffix("GiB"))
            want = everything[str(one.point["router"]), host, int(str(one.point["workers"]))]
            assert {name: one.values[name] for name in want} == pytest.approx(want)
    # What costs more than a point that keeps the limits needs no replay.
    assert made.replayed < 16 and any(one.state == "skipped" for one in made.trials)


def test_a_front_is_what_nothing_beats(tmp_path: Path) -> None:
    made = searched(tmp_path, "min cost, min ttft_p99", None, trials=14)
    done = [one for one in made.trials if one.state == "done"]
    points = {(one.cost, one.values["ttft_p99"]) for one in done}
    front = {
        (cost, time)
        for cost, time in points
        if not any((c <= cost and t <= time) and (c, t) != (cost, time) for c, t in points)
    }
    assert {(one.cost, one.values["ttft_p99"]) for one in made.best} == front and len(front) > 1
    assert made.answer in made.best and made.replayed == 14
    assert all(one.test for one in made.best[:3])


@pytest.mark.slow
def test_the_same_again_byte_for_byte(done: Tuned, tmp_path: Path) -> None:
    again = searched(tmp_path)
    one, two = ({path.name: path.read_bytes() for path in made.save()} for made in (done, again))
    assert one == two and set(one) == {"tune.csv", "tune.json", "tune.html", "tune.toml"}
    other = searched(tmp_path / "seed", seed=1)
    assert [trial.point for trial in other.trials] != [trial.point for trial in done.trials]


class Interrupted(LocalExecutor):
    """Ctrl-C in the middle of the replay after so many."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def run(self, tasks: Sequence[Task], ended: Callable[[str, str | None], None], told: Any = None) -> None:
        if self.left <= 0:
            raise KeyboardInterrupt
        self.left -= 1
        super().run(tasks, ended, told)


def test_an_interrupted_search_goes_on_as_if_it_hadn_t_been(done: Tuned, tmp_path: Path) -> None:
    first = searched(tmp_path, executor=Interrupted(3))
    assert first.interrupted and 0 < first.replayed < 8
    first.save()
    assert "interrupted" in (tmp_path / "tune.toml").read_text()
    second = searched(tmp_path, executor=Interrupted(2))
    assert second.interrupted and second.found == first.replayed < second.replayed
    last = searched(tmp_path)
    assert not last.interrupted and last.found == second.replayed
    assert [one.point for one in last.trials] == [one.point for one in done.trials]
    for one, other in zip(last.trials, done.trials, strict=True):
        assert (one.state, one.values, one.test) == (other.state, other.values, other.test)


def test_more_trials_go_on_from_there(done: Tuned, tmp_path: Path) -> None:
    searched(tmp_path, trials=3)
    ran: set[str] = set()
    more = searched(tmp_path, progress=lambda key, through, now: ran.add(key))
    assert more.found == 3 and [one.point for one in more.trials] == [one.point for one in done.trials]
    known = searched(tmp_path, progress=lambda key, through, now: pytest.fail("nothing is left to replay"))
    assert known.found == known.replayed


@pytest.mark.slow
def test_processes_search_the_same_as_each_other(tmp_path: Path) -> None:
    """Two at a time is another search than one, and the same each time."""

    class Batches(LocalExecutor):
        """As with two processes, without the processes."""

        def __init__(self) -> None:
            super().__init__()
            self.jobs = 2

        def run(self, tasks: Sequence[Task], ended: Callable[[str, str | None], None], told: Any = None) -> None:
            LocalExecutor().run(tasks[::-1], ended, told)

    one = searched(tmp_path / "a", trials=6, executor=Batches())
    two = searched(tmp_path / "b", trials=6, executor=LocalExecutor(2))
    assert [trial.point for trial in one.trials] == [trial.point for trial in two.trials]
    assert [path.read_bytes() for path in one.save()] == [path.read_bytes() for path in two.save()]


def test_no_point_meets_the_slo(tmp_path: Path) -> None:
    made = searched(tmp_path, slo="ttft_p99=50", trials=5)
    assert not made.met and made.answer is not None
    closest = min((one for one in made.trials if one.state == "done"), key=lambda one: one.values["ttft_p99"])
    assert made.answer.point == closest.point
    made.save()
    text = (tmp_path / "tune.toml").read_text()
    assert "No point of 5 meets the SLO (ttft_p99 ≤ 50 ms). The closest is" in text
    assert json.loads((tmp_path / "tune.json").read_text())["met"] is False


def test_a_cost_beyond_the_limit_needs_no_replay(tmp_path: Path) -> None:
    made = searched(tmp_path, "min ttft_p99", "cost<5", trials=6)
    assert made.met and all(one.cost <= 5 for one in made.trials if one.state != "skipped")
    assert any(one.why == "it costs more than the limit" for one in made.trials)


@pytest.mark.slow
def test_points_hopeless_on_a_prefix_are_dropped(tmp_path: Path) -> None:
    made = searched(tmp_path, slo="ttft_p99=3000", search="workers=1..8", limit=620, trials=6, num_gpu_blocks=1024)
    pruned = [one for one in made.trials if one.state == "pruned"]
    assert made.parts.requests["prefix"] >= 100
    assert pruned and all(one.violation > 0.5 and "misses the limits by far" in one.why for one in pruned)
    # Given up means not replayed as a whole: there is a report of the prefix alone.
    reports = len(list((tmp_path / "points").iterdir()))
    whole = sum(one.state == "done" for one in made.trials)
    assert reports <= 2 * whole + len(pruned) + 1


class Pairs(LocalExecutor):
    """As with two processes, without the processes."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs = 2

    def run(self, tasks: Sequence[Task], ended: Callable[[str, str | None], None], told: Any = None) -> None:
        LocalExecutor().run(tasks, ended, told)


def test_points_asked_for_twice_count_once_also_when_a_search_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is known of prefixes decides who is given up: it is the same for a search that goes on."""
    known: list[list[float]] = []
    searches = import_module("kvyard.lab.tune.tune")._Search
    run = searches.run

    def noted(self: Any) -> None:
        run(self)
        known.append(sorted(self._prefixes))

    monkeypatch.setattr(searches, "run", noted)
    same: dict[str, Any] = {
        "goal": "min ttft_mean",
        "slo": None,
        "search": "workers=2|3",
        "executor": Pairs(),
        "trials": 8,
        "limit": 620,
    }
    first = searched(tmp_path, **same)
    names = [one.identity for one in first.trials]
    assert any(one == other for one, other in zip(names[::2], names[1::2], strict=False)), "two of a round are the same"
    searched(tmp_path, **same)
    assert known[0] and known[1] == known[0]


def test_the_edge_of_a_range_is_named(tmp_path: Path) -> None:
    made = searched(tmp_path, "min ttft_p99", None, search="workers=2..3", trials=4)
    assert made.answer is not None and made.answer.point == {"workers": 3}
    made.save()
    assert "workers 3 is at the high end of its range: look above it too." in (tmp_path / "tune.toml").read_text()


def test_more_blocks_than_the_card_holds_are_a_what_if(tmp_path: Path) -> None:
    more: dict[str, Any] = {"model": "llama-3.1-8b", "gpu": "h100", "block_size": None, "limit": 20, "trials": 2}
    more["search"] = "workers=1..2"
    said = searched(tmp_path / "over", "max reuse", None, num_gpu_blocks=90_000, **more).sentences()
    assert any(sentence.startswith("A what-if: 90,000 blocks on each device") for sentence in said)
    said = searched(tmp_path / "in", "max reuse", None, num_gpu_blocks=20_000, **more).sentences()
    assert not any("what-if" in sentence for sentence in said)


def test_no_more_blocks_are_advised_than_the_card_holds(tmp_path: Path) -> None:
    more: dict[str, Any] = {"model": "llama-3.1-8b", "gpu": "h100", "block_size": None, "limit": 20, "trials": 2}
    more |= {"search": "num_gpu_blocks=90000..90001", "num_gpu_blocks": None}
    made = searched(tmp_path, "max reuse", None, **more)
    assert made.answer is not None and made.space.edges(made.answer.point)
    assert not any("of its range" in sentence for sentence in made.sentences())


def test_more_workers_are_no_advice_against_rejections(tmp_path: Path) -> None:
    made = searched(tmp_path, slo="ttft_p99<1h", search="workers=2..3", trials=4, max_model_len=4096)
    said = " ".join(made.sentences())
    assert "of the requests are rejected (limit 1%); cost" in said and "of its range" not in said


def test_a_point_that_cannot_be_is_no_answer(tmp_path: Path) -> None:
    """Storage without host memory is refused by the settings themselves."""
    made = searched(tmp_path, slo=None, search="host_bytes=0|1GiB,storage_bytes=0|4GiB", trials=4)
    failed = [one for one in made.trials if one.state == "failed"]
    assert failed and all(one.point == {"host_bytes": "0", "storage_bytes": "4GiB"} for one in failed)
    assert made.answer is not None and made.answer.point["host_bytes"] == "0"


def test_the_file_gives_the_same_replay(done: Tuned, tmp_path: Path) -> None:
    done.save()
    answer = done.answer
    assert answer is not None
    source = open_trace(CONVERSATION, limit=60)
    report = replay(done.parts.train.of(source), config=done.folder / "tune.toml").report
    assert report.latency["ttft"].p99 == answer.values["ttft_p99"]
    assert done.parts.test is not None
    tested = replay(done.parts.test.of(source), config=done.folder / "tune.toml").report
    assert tested.latency["ttft"].p99 == answer.test["ttft_p99"] and tested.reuse["all"].value == answer.test["reuse"]
    found = tomllib.loads((done.folder / "tune.toml").read_text())
    assert set(found) == {"router", "replay", "prices"} and found["prices"]["host"] == 0.3


def test_options_of_the_router_reach_the_file(tmp_path: Path) -> None:
    made = searched(tmp_path, slo=None, search="router.*", router="aibrix", trials=3, workers=3, goal="min ttft_mean")
    made.save()
    assert made.answer is not None
    found = tomllib.loads((tmp_path / "tune.toml").read_text())
    assert found["router"] == {"policy": "aibrix", "options": made.answer.point["router_options"]}
    assert replay(CONVERSATION, config=tmp_path / "tune.toml", limit=5).report.config


def test_prefill_and_decode_workers_are_counted_apart(tmp_path: Path) -> None:
    made = searched(tmp_path, "min ttft_mean", None, search="prefill=1..3,decode=1..2", trials=3)
    made.save()
    answer = made.answer
    assert answer is not None
    assert answer.cost == float(str(answer.point["prefill"])) + float(str(answer.point["decode"])), "a card each at 1.0"
    found = tomllib.loads((tmp_path / "tune.toml").read_text())
    assert "workers" not in found["replay"] and found["replay"]["prefill"] == answer.point["prefill"]
    assert made.parts.test is not None
    tested = replay(made.parts.test.of(open_trace(CONVERSATION, limit=60)), config=tmp_path / "tune.toml").report
    assert tested.latency["ttft"].mean == answer.test["ttft_mean"]


def test_a_fleet_that_is_scaled_costs_what_it_had(tmp_path: Path) -> None:
    scaled = "threshold:ttft_p99=1s,min=1,max=6,startup=1s"
    made = searched(tmp_path, slo=None, search="workers=2..3", autoscale=scaled, trials=2, test=0)
    for one in made.trials:
        if one.state == "done":
            settings = {**BASE, "autoscale": scaled, **one.point}
            report = replay(CONVERSATION, **settings).report
            assert report.scaling is not None
            (mean,) = report.scaling.mean_workers.values()
            assert one.cost == one.values["cost"] == pytest.approx(mean) and mean > 1


def test_rows(done: Tuned) -> None:
    done.save()
    with (done.folder / "tune.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(done.trials) and sum(row["answer"] == "True" for row in rows) == 1
    (answer,) = (row for row in rows if row["answer"] == "True")
    assert float(answer["test_ttft_p99"]) > 0 and answer["slo_met"] == "True"


def test_a_file_that_is_no_search_s_own(tmp_path: Path) -> None:
    (tmp_path / "study.journal").write_text("something else\n" * 3)
    with pytest.raises(KvyardError, match="can't be read as a search's file"):
        searched(tmp_path)
    assert (tmp_path / "study.journal").read_text().startswith("something else")


def test_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "never"
    with pytest.raises(KvyardError, match="trials must be at least 1"):
        searched(folder, trials=0)
    with pytest.raises(KvyardError, match="workers is both set and searched"):
        searched(folder, workers=3)
    with pytest.raises(KvyardError, match="--test 2"):
        searched(folder, test=2)
    assert not folder.exists()
