"""What times are worth: named with their error in the table, the page, the file, comparisons and sweeps."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.replay.report.support import reported, trace

from kvyard.lab.compare import compare
from kvyard.lab.sweep import sweep
from kvyard.replay.report import Report
from kvyard.replay.report import words as say
from kvyard.replay.report.files import from_json, to_json
from kvyard.replay.report.page import page
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
            0.1,
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
    file = msgspec.json.decode(to_json(report))["timing"]
    assert file == [{"kind": kind, "source": one.source, "error": one.error, "workers": 2}]


def test_latencies_have_a_range_where_an_error_is_known() -> None:
    report = roofline()
    ttft = report.latency["ttft"]
    text = report_text(report, 80)
    assert "about 10% off" in " ".join(text.split()) and "Give or take 10%" in text
    rows = {name: values for name, *values in say.range_rows(report)}
    assert list(rows) == ["ttft", "itl", "tpot", "e2e"]
    low, high = (float(part.replace(",", "")) for part in rows["ttft"][0].split("–"))
    assert (low, high) == (pytest.approx(0.9 * ttft.mean, rel=0.005), pytest.approx(1.1 * ttft.mean, rel=0.005))
    assert all(value in text for values in rows.values() for value in values)
    assert max(map(len, text.splitlines())) <= 80
    shown = page(report)
    assert rows["ttft"][0] in shown and "no measurement: about 10% off." in shown
    assert "Give or take" not in report_text(run()) and "Give or take" not in page(run())


def test_three_digits_are_enough() -> None:
    assert [say.ranged(value, 0.1) for value in (123_456.0, 1000.0, 99.0, 5.0, 0.01)] == [
        "111,000–136,000",
        "900–1,100",
        "89.1–109",
        "4.50–5.50",
        "0.00900–0.0110",
    ]


def test_queues_make_an_error_larger_and_the_table_says_so() -> None:
    report = roofline()
    busy = report.latency | {"queue": replace(report.latency["queue"], mean=0.8 * report.latency["ttft"].mean)}
    assert "80% of TTFT is waiting" in " ".join(report_text(replace(report, latency=busy)).split())
    idle = report.latency | {"queue": replace(report.latency["queue"], mean=0.0)}
    assert "of TTFT is waiting" not in report_text(replace(report, latency=idle))


def test_a_fleet_of_two_cards_names_both_and_takes_the_larger_error() -> None:
    report = replay(
        trace(20),
        model="llama-3.1-8b",
        timing="roofline",
        workers=[{"gpu": "h100", "name": "a"}, {"gpu": "b300", "count": 2, "name": "b"}],
    ).report
    assert [(one.workers, one.error) for one in report.timing] == [(1, 0.1), (2, 0.15)]
    assert report.timing_error == 0.15
    assert "(of 1 workers)" in say.times(report) and "on b300" in say.times(report)
    assert replace(report, timing=[*report.timing, *run().timing]).timing_error is None


def test_comparing_runs_of_one_timing_has_no_ranges() -> None:
    one, other = roofline(), replace(roofline(), label="other")
    found = compare([one, other])
    assert found.times == (
        "Times of all runs: roofline of llama-3.1-8b on h100, no measurement: about 10% off."
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
    assert "on h100, no measurement: about 10% off (gpu=h100)" in text
    assert "on mi300x, no measurement: about 15% off (gpu=mi300x)" in text
    done.save()
    rows = msgspec.json.decode((tmp_path / "sweep.json").read_bytes())["points"]
    assert [row["timing_error"] for row in rows] == [0.1, 0.15]
    assert "roofline of llama-3.1-8b on h100" in (tmp_path / "sweep.html").read_text("utf-8")
    alike = sweep(CONVERSATION, {"gpu": ["h100", "a100"]}, folder=tmp_path, config=given)
    alike.show()
    assert "about 10% off (gpu=h100); and 1 more like it, in sweep.csv." in " ".join(capsys.readouterr().out.split())
    same = sweep(CONVERSATION, {"workers": [1, 2]}, folder=tmp_path, config={**given, "workers": None, "gpu": "h100"})
    same.show()
    assert "An error that all points have cancels between them." in " ".join(capsys.readouterr().out.split())
