"""The table of studies: which metrics it shows, changes, and runs as columns."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from kvyard.lab.study import Row, Table, columns
from kvyard.replay.report.metrics import METRICS

ROWS = [
    Row(cells={"policy": "a"}, values={"ttft_mean": 100.0, "ttft_p50": 90.0, "reuse": 0.2, "rejected": 0}),
    Row(
        cells={"policy": "b"}, values={"ttft_mean": 50.0, "ttft_p50": 40.0, "reuse": 0.4, "rejected": 0}, link="b.html"
    ),
]


def printed(table: Table, width: int = 100) -> str:
    out = StringIO()
    table.print(Console(file=out, width=width, color_system=None))
    return out.getvalue()


def test_a_terminal_has_what_is_asked_for_and_what_is_rare() -> None:
    names = [metric.name for metric in Table(rows=ROWS, shown=("reuse", "ttft_mean", "itl_mean")).metrics()]
    assert names == ["reuse", "ttft_mean"], "nothing was rejected, and no run has an ITL"
    turned_away = [ROWS[0], Row(cells={"policy": "c"}, values={"rejected": 2})]
    assert "rejected" in {metric.name for metric in Table(rows=turned_away, shown=("reuse",)).metrics()}


def test_a_page_has_all_of_tables_with_the_asked_for_first() -> None:
    names = [metric.name for metric in Table(rows=ROWS, shown=("reuse",)).metrics(page=True)]
    assert names == ["reuse", "ttft_mean", "ttft_p50"]
    text = Table(rows=ROWS, shown=("reuse",)).html()
    assert '<a href="b.html">b</a>' in text and "TTFT mean,\u00a0ms" in text and "40.00%" in text


def test_changes_are_against_the_base() -> None:
    table = Table(rows=ROWS, shown=("ttft_mean", "reuse"), changes=("ttft_mean", "reuse"), base=ROWS[0].values)
    text = printed(table)
    assert "50.00 -50.0%" in text and "+20.0 pt" in text and "TTFT (change)" in text
    assert "-50.0%" in table.html()


def test_no_figure_is_cut() -> None:
    text = printed(Table(rows=ROWS, shown=tuple(METRICS)), width=24)
    assert "…" not in text and "Not shown" in text and max(map(len, text.splitlines())) <= 24


def test_a_narrow_terminal_keeps_rejections() -> None:
    rows = [Row(cells={"policy": "a"}, values={**dict.fromkeys(METRICS, 1.0), "rejected": 7})]
    text = printed(Table(rows=rows, shown=("ttft_mean", "reuse", "e2e_mean")), width=30)
    shown, left_out = text.split("Not shown")
    assert "rejected" in shown and "E2E" not in shown and "E2E" in left_out


def test_runs_as_columns() -> None:
    table = Table(rows=ROWS, runs=["a", "b"])
    text = printed(table)
    assert "50.00 *" in text and "-50.0%" in text and "Latency, ms" in text and "Requests rejected" not in text
    assert 'class="value best"' in table.html() and "a (yardstick)" in table.html()


def test_columns_have_all_metrics() -> None:
    found = columns({"ttft_mean": 3.0})
    assert found["ttft_mean_ms"] == 3.0 and found["reuse"] is None and len(found) == len(METRICS)
