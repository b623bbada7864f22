"""A comparison as text for a terminal, and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvyard.errors import KvyardError
from kvyard.files import write_whole
from kvyard.replay.report import figures as draw
from kvyard.replay.report.compare import ComparedLine, Comparison
from kvyard.replay.report.html import Page, card, grid, head, row, table
from kvyard.replay.report.numbers import Histogram
from kvyard.replay.report.report import LATENCIES, TIERS, Report
from kvyard.replay.report.words import SHORT, amount, measured, percent, whole

if TYPE_CHECKING:
    from rich.console import Console

MOST = len(draw.RUN_COLORS)
"""Runs that a page can draw: as many as there are colours to tell apart."""
NAME_WIDTH = 34
RUN_WIDTH = 21
FEW_SETTINGS = 12
LONGEST = 60
"""Of a setting in the terminal."""
FEW_POINTS = 50


def value_text(line: ComparedLine, number: int) -> str:
    """A run's value."""
    value = line.values[number]
    if value is None:
        return "–"
    if line.unit == "share":
        return percent(value)
    if line.unit == "bytes":
        return amount(value)
    return whole(value) if line.unit == "count" else f"{value:.3f}" if line.unit == "ratio" else measured(value)


def change_text(line: ComparedLine, number: int) -> str:
    """How far a run is from the first; empty for the first itself."""
    change = line.changes[number]
    if change is None or not number:
        return ""
    text = f"{change * 100:+.1f}"
    if float(text) == 0:
        text = "±0"
    return f"{text} pt" if line.unit == "share" else f"{text}%"


def print_comparison(found: Comparison, console: Console | None = None) -> None:
    """Print ``found``. Where runs don't fit side by side they come in several tables, each with the first run."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from kvyard.replay.report.table import plain_console

    console = console or plain_console()
    for note in found.notes:
        console.print(f"[yellow]{escape(note)}[/yellow]")
    fit = max(1, (console.width - NAME_WIDTH) // RUN_WIDTH - 1)
    others = list(range(1, len(found.runs)))
    for at in range(0, len(others), fit):
        shown = [0, *others[at : at + fit]]
        made = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="", padding=(0, 0, 0, 1), collapse_padding=True)
        made.add_column("", overflow="fold")
        for number in shown:
            made.add_column(f"[bold]{escape(found.runs[number])}[/bold]", justify="right", overflow="fold")
        part = ""
        for line in found.lines:
            if line.part != part:
                part = line.part
                made.add_section()
                made.add_row(f"[dim]{part}[/dim]")
            cells = []
            for number in shown:
                text = " ".join(filter(None, (value_text(line, number), change_text(line, number))))
                cells.append(f"[green]{text} *[/green]" if number in line.best else f"{text}  ")
            made.add_row(line.title, *cells)
        console.print(made)
    console.print(
        "[dim]* best, or within 0.5% of it; changes are against the first run, of shares in points of a percent.[/dim]"
    )
    _print_settings(found, console)


def _print_settings(found: Comparison, console: Console) -> None:
    from rich.markup import escape

    if not found.settings:
        console.print("All runs have the same settings.")
        return
    console.print("\n[bold]Set differently[/bold]")
    for path, values in list(found.settings.items())[:FEW_SETTINGS]:
        console.print("  " + escape(f"{path}: {' | '.join(_shortened(_setting(value)) for value in values)}"))
    more = len(found.settings) - FEW_SETTINGS
    if more > 0:
        console.print(f"  and {more} more: --json has them all")


def _setting(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_setting(one)}" for name, one in value.items() if one is not None)
    return "–" if value is None else str(value)


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def write_comparison(found: Comparison, reports: Sequence[Report], path: str | Path) -> None:
    """Write the page, in place of what was there. Raises ``KvyardError`` where that can't be done, and for too many runs."""
    write_whole(path, comparison_page(found, reports))


def comparison_page(found: Comparison, reports: Sequence[Report]) -> str:
    """The page's text. Raises ``KvyardError`` for more runs than can be told apart by colour."""
    if len(reports) > MOST:
        raise KvyardError(
            f"a page shows at most {MOST} runs side by side, not {len(reports)}: choose some, or leave out --html"
        )
    made = Page("Comparison · kvyard")
    made.add(
        head(
            " vs ".join(found.runs) if len(found.runs) < 4 else f"{len(found.runs)} runs",
            _line_of(reports),
            found.notes,
        )
    )
    made.section(
        "In numbers",
        f"Changes are against {found.runs[0]}; of shares, in points of a percent. ★ is best, or within 0.5% of it.",
    )
    made.add(grid("one", card("Measures", "", table(["", *found.runs], _rows(found)))))
    made.section(
        "Where prompt tokens came from",
        "Cool colours were reused, warm ones need not have been computed, grey ones had to.",
    )
    made.add(grid("one", made.figure("Prompt tokens", "by first admission", draw.composition(reports, found.runs))))
    made.section("Latency", "The share of requests (of gaps, for ITL) that took no longer. Further left is better.")
    cards = [
        made.figure(LATENCIES[key], "cumulative", _cumulative(reports, found.runs, key))
        for key in ("ttft", "e2e", "itl", "queue")
    ]
    made.add(grid("two", *cards))
    made.section("Over time", "Means of neighbouring windows of simulated time.")
    made.add(
        grid(
            "two",
            made.figure("Time to first token, median", "by arrival", _first_tokens(reports, found.runs, "ttft_p50")),
            made.figure("Time to first token, p99", "by arrival", _first_tokens(reports, found.runs, "ttft_p99")),
            made.figure("Prompt tokens reused", "from any tier, by first admission", _reused(reports, found.runs)),
            made.figure("Requests waiting", "all workers together", _waiting(reports, found.runs)),
        )
    )
    made.section("Set differently", "All else is the same in every run.")
    rows = [row([path, *map(_setting, values)]) for path, values in found.settings.items()]
    made.add(
        grid(
            "one",
            card("Settings", "" if rows else "There is no difference.", table(["", *found.runs], rows, long=True)),
        )
    )
    return made.text()  # fmt: skip


def _line_of(reports: Sequence[Report]) -> str:
    first = reports[0]
    trace = first.trace.get("name")
    same = all(report.digest == first.digest for report in reports)
    if not same:
        return "different requests"
    return f"{first.requests['all']:,} requests{f' of {trace}' if trace else ''}, the same for all"


def _rows(found: Comparison) -> list[str]:
    rows, part = [], ""
    for line in found.lines:
        if line.part != part:
            part = line.part
            rows.append(row([part, *([""] * len(found.runs))], "part"))
        cells = [line.title]
        for number in range(len(found.runs)):
            cells.append("  ".join(filter(None, (value_text(line, number), change_text(line, number)))))
        rows.append(
            row(cells, marks=["", *("best" if number in line.best else "" for number in range(len(found.runs)))])
        )
    return rows


def _cumulative(reports: Sequence[Report], runs: Sequence[str], key: str) -> draw.Figure:
    series = []
    for report, run, color in zip(reports, runs, draw.RUN_COLORS):
        x, y = draw.cumulative(report.histograms.get(key, Histogram()))
        if x:
            series.append({"name": run, "x": x, "y": y, "color": color})
    what = "gaps" if key == "itl" else "requests"
    return draw.cumulative_figure(series, f"{SHORT[key]}, milliseconds (log)", f"share of {what}", LATENCIES[key]) | {
        "height": 260
    }


def _first_tokens(reports: Sequence[Report], runs: Sequence[str], field: str) -> draw.Figure:
    values = [_coarse(report, getattr(report.series, field)) for report in reports]
    return _over_time(reports, runs, values, "TTFT, milliseconds (log)") | {"yScale": "log", "yFormat": "ms"}


def _reused(reports: Sequence[Report], runs: Sequence[str]) -> draw.Figure:
    values = []
    for report in reports:
        prompts = report.series.prompts
        totals = [sum(column) for column in zip(*prompts.values())]
        parts = [sum(column) for column in zip(*(prompts[tier] for tier in TIERS if tier in prompts))] or [0] * len(
            totals
        )
        values.append(_coarse(report, [part / total if total else None for part, total in zip(parts, totals)]))
    return _over_time(reports, runs, values, "share of prompt tokens") | {"yFormat": "percent"}


def _coarse(report: Report, values: Sequence[float | None]) -> tuple[list[float], list[float | None]]:
    """Fewer points than windows, so that lines over each other can be followed."""
    step = -(-len(values) // FEW_POINTS) or 1
    return _known(draw.coarse(draw.windows(report)[: len(values)], step)), draw.coarse(values, step)


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _waiting(reports: Sequence[Report], runs: Sequence[str]) -> draw.Figure:
    values = []
    for report in reports:
        times, waiting = report.timeline.times_s, report.timeline.values.get("waiting", [])
        step = -(-len(times) // FEW_POINTS) or 1
        values.append((_known(draw.coarse(times, step)), draw.coarse([sum(column) for column in zip(*waiting)], step)))
    return _over_time(reports, runs, values, "requests")


def _over_time(
    reports: Sequence[Report],
    runs: Sequence[str],
    values: Sequence[tuple[Sequence[float], Sequence[float | None]]],
    y: str,
) -> draw.Figure:
    by, name = draw.unit(max(report.duration_s for report in reports))
    return {
        "kind": "lines",
        "series": [
            {
                "name": run,
                "x": draw.rounded([at / by for at in times]),
                "y": [None if value is None else float(f"{value:.6g}") for value in line],
                "color": color,
            }
            for run, color, (times, line) in zip(runs, draw.RUN_COLORS, values)
        ],
        "xMin": 0,
        "xTitle": f"{name} since the first arrival",
        "xUnit": name,
        "yTitle": y,
    }
