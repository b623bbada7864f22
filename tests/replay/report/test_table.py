"""Reports in a terminal."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console
from tests.replay.report.support import config, reported

from kvyard.replay.fleet import Fleet
from kvyard.replay.report import Report, make_report
from kvyard.replay.report import words as say
from kvyard.replay.report.report import LATENCIES, LENGTHS
from kvyard.replay.report.table import _measurements, print_report, report_text

TIERED = {"policy": "kv", "blocks": 2200, "host": 4000}


def cells(text: str, start: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.strip().startswith(start))
    return line.strip()[len(start) :].split()


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("settings", [{"policy": "kv"}, TIERED, {"policy": "round-robin", "workers": 2, "dp": 2}])
def test_fits_and_is_plain(width: int, settings: dict[str, object]) -> None:
    text = report_text(reported(**settings), width)  # type: ignore[arg-type]
    assert "\x1b" not in text and "…" not in text and "[bold]" not in text
    assert max(map(len, text.splitlines())) <= width


def test_measurements_are_the_reports() -> None:
    report = reported()
    text = report_text(report, 110)
    heads = cells(text, "Finished requests")
    assert heads == ["mean", "min", "max", "p50", "p90", "p95", "p99", "std"]
    for name, key in (
        ("Time to first token (ms)", "ttft"),
        ("Inter-token latency (ms)", "itl"),
        ("Queue time (ms)", "queue"),
    ):
        shown = [float(cell.replace(",", "")) for cell in cells(text, name)]
        meant = [getattr(report.latency[key], head) for head in heads]
        assert shown == pytest.approx(meant, rel=0.001, abs=0.006)
    assert cells(text, "Input length (tokens)")[0] == f"{report.lengths['input'].mean:,.0f}"


def test_shares_have_numerator_and_denominator() -> None:
    report = reported(**TIERED)  # type: ignore[arg-type]
    text = report_text(report, 110)
    assert f"{report.reuse['all'].whole:,} prompt tokens of admitted requests" in text
    assert cells(text, "Found on the device") == [
        f"{report.reuse['device'].part:,}",
        f"{report.reuse['device'].value:.2%}",
    ]
    assert cells(text, "Loaded from host memory")[0] == f"{report.reuse['host'].part:,}"
    assert cells(text, "at best: endless cache, shared by all")[1] == f"{report.bounds['infinite'].value:.2%}"
    assert cells(text, "Computed: never seen before")[0] == f"{report.missed_tokens['never_seen'].part:,}"
    assert f"{report.router.regret.part:,} / {report.router.regret.whole:,}" in text
    assert "Device to host" in text and "requests waited for loads" in text
    assert report.goodput is not None
    assert f"{report.goodput.requests.part:,} / {report.goodput.requests.whole:,} requests" in text


def test_unknown_figures_are_reported() -> None:
    text = report_text(reported(policy="round-robin", blocks=2200))
    assert "round-robin saw no worker with any of a prompt" in text
    empty = report_text(make_report(Fleet(config())))
    assert cells(empty, "Time to first token (ms)") == ["-"] * 8


def test_an_interrupted_run_says_so() -> None:
    from msgspec.structs import replace

    report: Report = replace(reported(), complete=False, label="a [b]label[/b]")
    text = report_text(report)
    assert "interrupted" in text and "a [b]label[/b]" in text


def test_colours_on_a_terminal() -> None:
    out = StringIO()
    print_report(reported(), Console(file=out, force_terminal=True, width=110))
    assert "\x1b[1m" in out.getvalue()


def test_figures_are_short_where_there_is_no_room() -> None:
    report = reported()
    for roomy in (True, False):
        (shown,) = [list(column.cells) for column in _measurements(report, roomy).columns[1:2]]
        means = [(report.latency[key].mean, say.measured) for key in LATENCIES]
        means += [(report.lengths[key].mean, say.whole) for key in LENGTHS]
        assert shown == [(show if roomy else say.short)(mean) for mean, show in means]
