"""Workers that come and go: what starts when, what is lost with whom, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from tests.replay.support import SECOND, request, sessions

from kvyard.engine.config import EngineConfig
from kvyard.engine.price_list import default_prices
from kvyard.engine.timing import FixedTiming
from kvyard.errors import KvyardError
from kvyard.replay.config import ReplayConfig, WorkerConfig, read_autoscale
from kvyard.replay.fleet import Fleet
from kvyard.replay.report.files import from_json, to_json
from kvyard.replay.report.scaling import flaps
from kvyard.replay.report.table import report_text
from kvyard.replay.report.words import scaled
from kvyard.replay.run import SimulatedRun, replay
from kvyard.replay.scaling import SCALERS, RoleState, Scaler, Snapshot
from kvyard.replay.scaling.autoscaler import ScalingAction
from kvyard.replay.settings import make_config
from kvyard.router import RouterConfig
from kvyard.router.pace import LearntPace

SMALL = {"block_size": 16, "num_gpu_blocks": 600, "router": "kv"}


class ByTheClock(Scaler):
    """So many workers from so many seconds on; options are ``n10=3``: three from second 10 on."""

    OPTIONS = {f"n{at}": 0.0 for at in range(0, 200, 5)}

    def wanted(self, seen: Snapshot) -> Mapping[str, int]:
        plan = [(int(name[1:]), int(count)) for name, count in self.options.items() if count]
        now = [count for at, count in plan if at <= seen.now_s + 1e-9]
        return dict.fromkeys(seen.roles, now[-1]) if now else {}


HERE = f"{__name__}:ByTheClock"


def run(trace, options: str, **more: object) -> SimulatedRun:
    return replay(trace, autoscale=f"{HERE}:{options}", **{"workers": 1, **SMALL, **more})


def steady(seconds: int, rate: float = 2.0, **more: object):
    """A request every so often, each with a text of its own."""
    count = int(seconds * rate)
    return [request(f"r{at}", at / rate, ids=(1000 + at,), id_block_size=512, **more) for at in range(count)]


def test_constant_changes_nothing():
    trace = list(sessions(60, seed=2))
    plain = replay(trace, workers=2, **SMALL)
    scaled = replay(trace, workers=2, autoscale="constant:min=1,max=4", **SMALL)
    assert list(plain.fleet.records.values()) == list(scaled.fleet.records.values())
    made = scaled.report.scaling
    assert made is not None and not made.actions
    assert made.worker_seconds["both"] == pytest.approx(2 * scaled.report.duration_s, rel=1e-3)


def test_a_worker_takes_requests_after_its_start_up_and_not_before():
    done = run(steady(60), "n10=3,max=4,startup=20s,period=5s")
    made = done.report.scaling
    assert made is not None and [action[1:] for action in made.actions] == [("both", 1, 3)]
    asked = made.actions[0][0]
    assert asked == pytest.approx(10, abs=5)
    first = {}
    for record in done.fleet.records.values():
        first.setdefault(record.worker, record.arrival)
    assert set(first) == {"w0", "w1", "w2"}
    for name in ("w1", "w2"):
        assert (asked + 20) * SECOND <= first[name] <= (asked + 24) * SECOND


def test_workers_cost_from_the_request_until_they_are_off():
    done = run(steady(100), "n10=3,n50=1,max=4,startup=10s,period=5s")
    made = done.report.scaling
    assert made is not None and made.stops == 2
    (up, *_), (down, *_) = made.actions
    end = done.fleet.now / SECOND
    whole = end + 2 * (down - up)
    assert whole <= made.worker_seconds["both"] <= whole + 2 * 5  # and until what they had was through
    assert made.mean_workers["both"] == pytest.approx(made.worker_seconds["both"] / done.report.duration_s)


def test_start_ups_are_cancelled_before_any_worker_is_let_go():
    done = run(steady(60), "n10=3,n20=2,n30=1,max=4,startup=100s,period=5s")
    made = done.report.scaling
    assert made is not None and (made.cancelled, made.stops) == (2, 0)
    assert {record.worker for record in done.fleet.records.values()} == {"w0"}


def same_text(seconds: int):
    return [request(f"r{at}", at, ids=(1, 2), id_block_size=512, input_length=1024) for at in range(seconds)]


@pytest.mark.parametrize(("warm", "first"), [("no", 0), ("yes", 1008)])
def test_caches_are_cold_after_a_stop_unless_they_are_kept(warm, first):
    """One of two workers goes and comes back; what its first request then finds says whether its cache was there."""
    options = f"n20=1,n40=2,min=1,max=2,startup=5s,period=5s,warm={warm}"
    done = replay(same_text(80), workers=2, autoscale=f"{HERE}:{options}", **{**SMALL, "router": "round-robin"})
    gone = next(
        one
        for one in ("w0", "w1")
        if not any(
            record.worker == one and 25 * SECOND < record.arrival < 40 * SECOND
            for record in done.fleet.records.values()
        )
    )
    again = next(
        record for record in done.fleet.records.values() if record.worker == gone and record.arrival > 40 * SECOND
    )
    assert again.cached == first
    made = done.report.scaling
    assert made is not None and bool(made.lost_blocks) == (warm == "no")


def test_blocks_lost_with_a_worker_exclude_those_that_others_have():
    """Each text is computed once by whoever is free; after the stop the texts of that worker have to be computed again."""
    trace = [request(f"a{at}", at / 2, ids=(at,), id_block_size=512, input_length=512) for at in range(20)]
    trace += [request(f"b{at}", 40 + at / 2, ids=(at,), id_block_size=512, input_length=512) for at in range(20)]
    options = "n20=1,min=1,max=2,startup=5s,period=5s"
    done = replay(trace, workers=2, autoscale=f"{HERE}:{options}", **{**SMALL, "router": "round-robin"})
    records = done.fleet.records
    gone = {record.worker for record in records.values()} - {records["b19"].worker}
    lost = [at for at in range(20) if records[f"a{at}"].worker in gone]
    assert len(lost) == 10
    assert {at for at in range(20) if records[f"b{at}"].gone} == set(lost)
    made = done.report.scaling
    assert made is not None and made.lost.part == 10 * 512


def test_requests_that_wait_go_elsewhere_and_those_that_run_stay():
    """Twenty long prompts at once on two workers: the one that is let go keeps what it has begun."""
    trace = [request(f"r{at}", 0, ids=None, input_length=6000, output_length=400) for at in range(16)]
    trace += [request("late", 30, ids=None)]
    moved = {}
    for moves in ("yes", "no"):
        options = f"n5=1,min=1,max=2,startup=5s,period=5s,moves={moves}"
        done = replay(trace, workers=2, autoscale=f"{HERE}:{options}", **{**SMALL, "router": "round-robin"})
        assert all(record.status == "finished" for record in done.fleet.records.values())
        moved[moves] = sum(record.worker == "w0" for record in done.fleet.records.values())
    assert moved["yes"] != moved["no"]


@pytest.mark.parametrize("policy", ["threshold:queue=2,patience=10s", "predictive:patience=10s"])
@pytest.mark.parametrize("fleet", [{"workers": 1}, {"prefill": 1, "decode": 1}])
def test_both_ways_of_planning_agree_and_a_burst_brings_workers_that_leave_again(policy, fleet):
    trace = steady(30, rate=1) + [request(f"x{at}", 30 + at / 40, ids=None, input_length=3000) for at in range(400)]
    trace += [request(f"y{at}", 50 + at * 2, ids=None) for at in range(60)]
    trace.sort(key=lambda row: row.arrival)
    records = []
    for plans in (True, False):
        done = replay(
            trace,
            plans=plans,
            autoscale=f"{policy},min=1,max=4,startup=3s,period=2s",
            **{**SMALL, "num_gpu_blocks": 4000},
            **fleet,
        )
        records.append(list(done.fleet.records.values()))
    assert records[0] == records[1]
    made = done.report.scaling
    assert made is not None
    assert max(after for _, _, _, after in made.actions) > 1
    assert made.stops, "none left after the burst"
    assert all(record.status == "finished" for record in records[0])
    if "prefill" in fleet:
        # Its short answers need no second worker to decode by the forecast; their queue does.
        assert {role for _, role, _, _ in made.actions} >= {"prefill"} | ({"decode"} if "queue" in policy else set())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("thresholt", "unknown scaling policy 'thresholt'"),
        ("threshold:tfft=1", "unknown option 'tfft' of the scaling policy threshold: choose one of ttft_p99"),
        ("threshold:min=3,max=2", "min must be at least 1 and at most max"),
        ("threshold:queue=-1", "queue of the scaling policy threshold must be at least 0, got -1"),
        ("threshold:startup=90", "such as 50ms"),
        ("no.such.module:Class", "can't be imported"),
        ("no.such.module:Class:min=1", "can't be imported"),
    ],
)
def test_senseless_settings_are_refused(text, words):
    with pytest.raises(KvyardError, match=words):
        read_autoscale("autoscale", text)


def test_settings_that_contradict_the_fleet_are_refused():
    for given, words in (
        ({"workers": 20, "autoscale": "constant"}, "20 workers 'w' at the start are not from min 1 to max 16"),
        ({"workers": [{"count": 1, "fail": "3s"}], "autoscale": "constant"}, "leave out start, drain and fail"),
        ({"workers": [{"count": 1}, {"count": 1}], "autoscale": "constant"}, "one kind of workers for each role"),
        ({"autoscale": 3}, "write POLICY:NAME=VALUE"),
    ):
        with pytest.raises(KvyardError, match=words):
            make_config(given)


def test_a_table_says_the_same_as_a_line():
    line = read_autoscale("autoscale", "threshold:ttft_p99=1.5s,min=2,max=9,startup=90s,period=5s,warm=yes")
    table = {"policy": "threshold", "ttft_p99": 1.5, "min": 2, "max": 9, "startup": "90s", "period": "5s", "warm": True}
    assert read_autoscale("autoscale", table) == line
    assert line.options == {"ttft_p99": 1.5} and line.startup == 90 * SECOND


def test_every_name_makes_one():
    for name in SCALERS.names():
        assert isinstance(SCALERS.get(name)({}), Scaler)


def test_workers_that_never_came_are_not_shown():
    done = replay(steady(20), workers=1, autoscale="threshold:queue=50,min=1,max=8", **SMALL)
    assert [worker.name for worker in done.report.workers] == ["w0"]
    assert all(len(rows) == 1 for rows in done.report.timeline.values.values())


def test_predictive_goes_down_after_a_minute_of_less_need():
    scaler = SCALERS.get("predictive")()
    state = RoleState("both", 3, 0, 0, 0, 0, 0.0, LearntPace(), 8)

    def idle(now: float) -> int:
        return scaler.wanted(Snapshot(now, 5.0, {"both": state}, 0, 0, 0, 0, 0, (), 10.0))["both"]

    assert [idle(now) for now in (0, 30, 59, 60)] == [3, 3, 3, 1]


def test_a_request_that_goes_elsewhere_is_there_an_instant_later():
    """Passes of the worker that stays end a nanosecond after full tenths of a second: what moves at 5 s is in the next one."""
    small, large = {"ids": None, "input_length": 16}, {"ids": None, "input_length": 6000}
    trace = [
        request("first", 0, output_length=1, **small),
        request("large", 0, output_length=200, **large),
        request("small", 1 + 1e-9, output_length=100, **small),
        request("waits", 1 + 1e-9, output_length=1, **large),
        request("stays", 1 + 1e-9, output_length=100, **small),
    ]
    engine = EngineConfig(
        block_size=16,
        num_gpu_blocks=600,
        max_num_batched_tokens=8192,
        timing=FixedTiming(prefill_ms=100, decode_ms=100),
    )
    fleet = Fleet(
        ReplayConfig(
            workers=(WorkerConfig(engine=engine, count=2),),
            router=RouterConfig(policy="round-robin"),
            autoscale=read_autoscale("autoscale", f"{HERE}:n5=1,min=1,max=2,startup=5s,period=5s"),
        )
    )
    fleet.run(trace)
    moved = fleet.records["waits"]
    assert moved.worker == fleet.records["stays"].worker != fleet.records["large"].worker
    assert moved.admitted == 5 * SECOND + 1


# -- what a day cost, and how it went -----------------------------------------------------------------------------------


def test_the_day_has_workers_and_attainment_in_the_windows_of_the_series() -> None:
    done = run(steady(60), "n10=3,n40=1,max=4,startup=20s,period=5s", slo="ttft=500,itl=30")
    report = done.report
    made, window = report.scaling, report.series.window_s
    assert made is not None and len(made.workers["both"]) == len(made.within_slo) == len(report.series.arrived)
    assert sum(made.workers["both"]) * window == pytest.approx(made.worker_seconds["both"], rel=0.01)
    assert made.workers["both"][0] == 1 and max(made.workers["both"]) == 3
    arrived = sum(report.series.arrived)
    kept = sum(came * (good or 0.0) for came, good in zip(report.series.arrived, made.within_slo, strict=True))
    assert report.goodput is not None and kept / arrived == pytest.approx(report.goodput.requests.value)
    assert "Over time, from" in report_text(report) and from_json(to_json(report)) == report


def test_without_an_slo_there_is_no_attainment_and_without_a_card_no_price() -> None:
    made = run(steady(30), "n10=2,max=4,startup=5s,period=5s").report.scaling
    assert made is not None and made.within_slo == [] and made.cost is None
    assert made.card_seconds == made.worker_seconds


def test_card_hours_have_a_price_with_its_currency_and_date() -> None:
    card = {
        "model": "llama-3.1-8b",
        "gpu": "h100",
        "tensor_parallel_size": 2,
        "num_gpu_blocks": None,
        "block_size": None,
    }
    report = run(steady(30), "n10=2,max=4,startup=5s,period=5s", **card).report
    made, prices = report.scaling, default_prices()
    assert made is not None and made.cost is not None
    assert made.card_seconds["both"] == pytest.approx(2 * made.worker_seconds["both"])
    assert made.cost.amount == pytest.approx(made.card_seconds["both"] / 3600 * prices.cards["h100"])
    text = " ".join(scaled(made))
    assert f"{made.cost.amount:.2f} USD (H100 at 2.35 an hour, prices of {prices.date})" in text


def test_a_scale_up_that_is_soon_undone_is_called_flapping() -> None:
    def up_and_down(seconds: float) -> list[ScalingAction]:
        return [ScalingAction(10.0, "both", 1, 3), ScalingAction(10.0 + seconds, "both", 3, 1)]

    assert flaps(up_and_down(590)) == 1 and flaps(up_and_down(610)) == 0
    partly = [ScalingAction(10.0, "both", 1, 3), ScalingAction(20.0, "both", 3, 2)]
    assert flaps(partly) == 0, "one of the two is still there"
    assert flaps([*partly, ScalingAction(30.0, "both", 2, 1)]) == 1
    assert flaps([ScalingAction(0.0, "prefill", 1, 3), ScalingAction(20.0, "decode", 3, 1)]) == 0
    made = run(steady(60), "n10=3,n40=1,max=4,startup=5s,period=5s").report.scaling
    assert made is not None and made.flaps == 1
    assert scaled(made)[-1].startswith("It flaps: 1 of 1 scale-ups were undone within 10 minutes.")
    calm = run(steady(60), "n10=3,max=4,startup=5s,period=5s").report.scaling
    assert calm is not None and scaled(calm)[-1] == "It doesn't flap: no scale-up was undone within 10 minutes."
