"""Accuracy of times: named with their error in the table, the page, the file, comparisons and sweeps."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.replay.report.support import reported, trace

from kvyard.engine.timing.error_range import RunClass, error_range
from kvyard.engine.timing.profile import load_profile
from kvyard.lab.compare import compare
from kvyard.lab.sweep import sweep
from kvyard.replay.report import Report, ranges
from kvyard.replay.report import words as say
from kvyard.replay.report.files import from_json, to_json
from kvyard.replay.report.numbers import Spread
from kvyard.replay.report.page import page
from kvyard.replay.report.report import StatedRange
from kvyard.replay.report.table import report_text
from kvyard.replay.run import replay

PROFILE = "h200-llama3-8b-graphs"


@cache
def run(**settings: object) -> Report:
    return replay(trace(30), workers=2, **settings).report


def roofline() -> Report:
    return run(model="llama-3.1-8b", gpu="h100", timing="roofline")


@pytest.mark.parametrize(
    ("settings", "kind", "words", "error"),
    [
        ({}, "polynomial", "Dynamo's default polynomial, not your card", None),
        ({"timing": "fixed:50,8"}, "fixed", "fixed, 50 ms for prompts and 8 ms for decode steps", None),
        ({"timing": f"profile:{PROFILE}"}, "profile", f"profile {PROFILE}, fitted to passes of NVIDIA H200", 0.019),
        (
            {"model": "llama-3.1-8b", "gpu": "h100", "timing": "roofline", "timing_speedup": 2},
            "roofline",
            "roofline of llama-3.1-8b on h100, no measurement, divided by 2",
            None,
        ),
    ],
)
def test_a_report_names_its_timing(settings: dict[str, object], kind: str, words: str, error: float | None) -> None:
    report = run(**settings)
    (one,) = report.timing
    assert (one.kind, one.workers) == (kind, 2) and one.source.startswith(words)
    assert one.error == (None if error is None else pytest.approx(error, abs=0.001))
    assert say.times(report) in " ".join(report_text(report).split())
    assert from_json(to_json(report)).timing == report.timing
    (file,) = msgspec.json.decode(to_json(report))["timing"]
    assert file == {
        "kind": kind,
        "source": one.source,
        "error": one.error,
        "held_out": {},
        "run_class": None,
        "workers": 2,
    }


def test_figures_have_the_range_of_comparable_published_runs() -> None:
    report = roofline()
    (timing,) = report.timing
    assert timing.run_class == RunClass(card="h100", dtype="bf16", model_class="dense", engine="vllm")
    known = error_range("ttft_mean", card="h100", dtype="bf16", model_class="dense", engine="vllm", load="above")
    assert known is not None and ranges.load_of(report.latency, report.loading) == "above"
    stated, ttft = report.ranges["ttft_mean"], report.latency["ttft"]
    assert (stated.low, stated.high) == pytest.approx(known.around(ttft.mean))
    assert (stated.basis, stated.runs, stated.sources) == ("published", known.runs, known.sources)
    text = " ".join(report_text(report).split())
    assert (
        f"TTFT mean {say.measured(ttft.mean)} ms; range {say.ranged(stated)} ms (80% of comparable published runs: "
        in text
    )
    assert "about 10% off" not in text and "80% of comparable runs" in text
    rows = {name: values for name, *values in say.range_rows(report)}
    assert rows["ttft"][0] == say.ranged(stated)
    assert max(map(len, report_text(report, 80).splitlines())) <= 80
    shown = page(report)
    assert rows["ttft"][0] in shown and "80% of comparable published runs" in shown
    assert from_json(to_json(report)).ranges == report.ranges


def test_without_evidence_a_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "error_range", lambda *_, **__: None)
    report = replay(trace(30), workers=2, model="llama-3.1-8b", gpu="h100", timing="roofline").report
    assert report.ranges == {}
    assert "No published run is comparable" in say.times(report)
    assert "comparable" not in say.times(run()) and run().ranges == {}


def test_a_profile_has_the_error_of_held_out_time(tmp_path: Path) -> None:
    known = load_profile(name=PROFILE)
    path = tmp_path / "mine.json"
    path.write_bytes(msgspec.json.encode(replace(known, held_out={"ttft": 0.2, "tpot": 0.01, "e2e": 0.05})))
    report = run(timing=f"profile:{path}")
    assert "TTFT 20%, TPOT 1%, E2E 5% off in time that was held out of the fit" in say.times(report)
    ttft, itl = report.ranges["ttft_p99"], report.ranges["itl_mean"]
    assert (ttft.low, ttft.high) == pytest.approx((0.8 * report.latency["ttft"].p99, 1.2 * report.latency["ttft"].p99))
    assert itl.high == pytest.approx(1.01 * report.latency["itl"].mean) and itl.basis == "held-out"
    assert run(timing=f"profile:{PROFILE}").ranges["e2e_mean"].basis == "passes"


@pytest.mark.parametrize(("queue", "load"), [(0.2, "below"), (0.5, "above")])
def test_the_knee_is_where_waiting_is_a_third_of_ttft(queue: float, load: str) -> None:
    latency = {name: Spread(count=10, mean=100.0) for name in ("ttft", "e2e")}
    latency["queue"] = Spread(count=10, mean=100.0 * queue)
    assert ranges.load_of(latency, Spread()) == load
    # What was loaded from a lower tier isn't waiting.
    assert ranges.load_of(latency, Spread(count=10, mean=40.0)) == "below"


def test_three_digits_are_enough() -> None:
    shown = [
        say.ranged(StatedRange(low=0.9 * value, high=1.1 * value, basis="passes"))
        for value in (123_456.0, 1000.0, 99.0, 5.0, 0.01)
    ]
    assert shown == ["111,000–136,000", "900–1,100", "89.1–109", "4.50–5.50", "0.00900–0.0110"]


def test_a_fleet_of_two_cards_names_both_and_has_the_range_of_both() -> None:
    report = replay(
        trace(20),
        model="llama-3.1-8b",
        timing="roofline",
        workers=[{"gpu": "h100", "name": "a"}, {"gpu": "b300", "count": 2, "name": "b"}],
    ).report
    assert [(one.workers, one.run_class.card) for one in report.timing if one.run_class] == [(1, "h100"), (2, "b300")]
    each = [
        ranges.make_ranges([one], report.latency, report.throughput, report.loading)["ttft_mean"]
        for one in report.timing
    ]
    stated = report.ranges["ttft_mean"]
    assert (stated.low, stated.high) == (min(one.low for one in each), max(one.high for one in each))
    assert "(of 1 workers)" in say.times(report) and "on b300" in say.times(report)
    mixed = [*report.timing, *run().timing]
    assert ranges.make_ranges(mixed, report.latency, report.throughput, report.loading) == {}


def test_comparing_runs_of_one_timing_has_no_ranges() -> None:
    one, other = roofline(), replace(roofline(), label="other")
    found = compare([one, other])
    assert found.times == (
        "Times of all runs: roofline of llama-3.1-8b on h100, no measurement."
        " An error that all runs have cancels in their changes."
    )
    assert found.notes == []
    assert found.times in found.page()
    mixed = compare([one, replace(run(), label="poly")])
    assert "Times are not of one kind" in mixed.times and "polynomial" in mixed.times
    assert compare([run(), replace(run(), label="again")]).times.endswith("the same for every model.")


def test_a_live_run_has_no_timing() -> None:
    report = replace(reported(), timing=[])
    assert say.times(report) == "" and "Times:" not in report_text(report)
    assert compare([report, replace(report, label="other")]).times == ""


def test_a_sweep_over_cards_names_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.replay.traces.support import CONVERSATION

    given = {"limit": 10, "workers": 1, "model": "llama-3.1-8b", "timing": "roofline"}
    done = sweep(CONVERSATION, {"gpu": ["h100", "mi300x"]}, folder=tmp_path, config=given)
    done.show()
    text = " ".join(capsys.readouterr().out.split())
    assert "on h100, no measurement (gpu=h100)" in text
    done.save()
    rows = msgspec.json.decode((tmp_path / "sweep.json").read_bytes())["points"]
    assert all(0 < row["ttft_mean_low"] <= row["ttft_mean_high"] for row in rows)
    assert "roofline of llama-3.1-8b on h100" in (tmp_path / "sweep.html").read_text("utf-8")
    alike = sweep(CONVERSATION, {"gpu": ["h100", "a100"]}, folder=tmp_path, config=given)
    alike.show()
    assert "no measurement (gpu=h100); and 1 more like it, in sweep.csv." in " ".join(capsys.readouterr().out.split())
    same = sweep(CONVERSATION, {"workers": [1, 2]}, folder=tmp_path, config={**given, "workers": None, "gpu": "h100"})
    same.show()
    assert "An error that all points have cancels between them." in " ".join(capsys.readouterr().out.split())
