"""The figures of a sweep, a row per point: for a terminal, as CSV and as JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from kvyard.events.tier import LOWER_TIERS
from kvyard.files import write_whole
from kvyard.lab.sweep.advice import advice
from kvyard.replay.report import Report
from kvyard.replay.report.fitting import fitted
from kvyard.replay.report.words import measured, percent, timing_text

if TYPE_CHECKING:
    from rich.console import Console

    from kvyard.lab.sweep.run import Sweep


class Figure(NamedTuple):
    """One column."""

    name: str
    head: str
    """For a table, short."""
    title: str
    """For an axis, with its unit."""
    best: Literal["low", "high", ""]
    """Where one is better than the other."""
    of: Callable[[Report], float | int | None]
    share: bool = False

    @property
    def column(self) -> str:
        """The head of a page's column: which statistic of what, and its unit."""
        what, _, rest = self.name.partition("_")
        return f"{what.upper()} {rest.removesuffix('_ms')}, ms" if rest.endswith("_ms") else self.head


def latency(name: str, field: str) -> Callable[[Report], float]:
    """A figure of one of the report's latencies."""
    return lambda report: float(getattr(report.latency[name], field))


def _counted(status: str) -> Callable[[Report], int]:
    return lambda report: report.requests.get(status, 0)


def _rate(name: str) -> Callable[[Report], float]:
    return lambda report: report.throughput[name]


def _reused(tier: str) -> Callable[[Report], float | None]:
    return lambda report: report.reuse[tier].value if tier in report.reuse else None


FIGURES = (
    Figure("ttft_mean_ms", "TTFT", "Mean time to first token, ms", "low", latency("ttft", "mean")),
    Figure("ttft_p50_ms", "p50", "Median time to first token, ms", "low", latency("ttft", "p50")),
    Figure("ttft_p99_ms", "p99", "p99 of time to first token, ms", "low", latency("ttft", "p99")),
    Figure("itl_mean_ms", "ITL", "Mean inter-token latency, ms", "low", latency("itl", "mean")),
    Figure("e2e_mean_ms", "E2E", "Mean end-to-end latency, ms", "low", latency("e2e", "mean")),
    Figure("reuse", "reused", "Prompt tokens not computed / prompt tokens admitted", "high", _reused("all"), True),
    Figure("reuse_device", "device", "Prompt tokens found on the device / admitted", "", _reused("device"), True),
    *(
        Figure(
            f"reuse_{tier.label}",
            tier.label,
            f"Prompt tokens loaded from {tier.place} / admitted",
            "",
            _reused(tier.label),
            True,
        )
        for tier in LOWER_TIERS
    ),
    Figure(
        "pulled",
        "pulled",
        "Prompt tokens pulled from other workers / admitted",
        "",
        lambda report: None if report.pulls is None else report.pulls.tokens.value,
        True,
    ),
    Figure("output_tokens_per_s", "out tok/s", "Output tokens per second", "high", _rate("output_tokens_per_s")),
    Figure("requests_per_s", "req/s", "Requests finished per second", "high", _rate("requests_per_s")),
    Figure(
        "goodput_requests_per_s",
        "good/s",
        "Requests per second within the SLO",
        "high",
        lambda report: None if report.goodput is None else report.goodput.requests_per_s,
    ),
    Figure("finished", "finished", "Requests finished", "high", _counted("finished")),
    Figure("rejected", "rejected", "Requests rejected", "low", _counted("rejected")),
    Figure("preemptions", "preempted", "Preemptions", "low", lambda report: report.preemptions),
)
SHOWN = ("ttft_mean_ms", "ttft_p99_ms", "itl_mean_ms", "e2e_mean_ms", "reuse", "reuse_host", "output_tokens_per_s")
"""In the terminal, where there is only so much room; others if they say anything."""
MOST_TIMES = 4
"""Kinds of timing that are named below the table."""
DULL = ("goodput_requests_per_s", "rejected", "preemptions", "reuse_storage", "reuse_remote", "pulled")
"""Left out where there is none of it."""


def rows(sweep: Sweep) -> list[dict[str, Any]]:
    """A row per point: what was varied, its figures, and why there are none where it failed."""
    failed = {failure.point.key: failure.why for failure in sweep.failures}
    found: list[dict[str, Any]] = []
    for point in sweep.grid.points:
        report = sweep.reports.get(point.key)
        figures = {figure.name: None if report is None else figure.of(report) for figure in FIGURES}
        error = "" if report is not None else failed.get(point.key, "not run yet")
        timing = None if report is None else "; ".join(one.source for one in report.timing)
        known = {"timing": timing, "timing_error": None if report is None else report.timing_error}
        found.append({**point.varied, **figures, **known, "error": error, "report": f"points/{point.key}.json"})
    return found


def write_csv(sweep: Sweep, path: Path) -> None:
    """Write all rows. Raises ``KvyardError`` where that can't be done."""
    text = io.StringIO()
    names = [*sweep.grid.axes, *(figure.name for figure in FIGURES), "timing", "timing_error", "error", "report"]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(sweep))
    write_whole(path, text.getvalue())


def write_json(sweep: Sweep, path: Path) -> None:
    """Write the axes and all rows. Raises ``KvyardError`` where that can't be done."""
    value = {"kind": "kvyard sweep", "trace": sweep.trace, "axes": sweep.grid.axes, "points": rows(sweep)}
    value["advice"] = advice(sweep)
    write_whole(path, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


def print_sweep(sweep: Sweep, console: Console | None = None) -> None:
    """Print the table, the best of each column in bold."""
    import sys

    from rich.console import Console as Terminal
    from rich.table import Table

    console = console or Terminal(width=None if sys.stdout.isatty() else 110)
    found = rows(sweep)
    done = [row for row in found if not row["error"]]
    shown = [figure for figure in FIGURES if figure.name in SHOWN or _says(figure.name, done)]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in sweep.grid.axes:
        table.add_column(name, overflow="fold")
    for figure in shown:
        table.add_column(figure.head, justify="right")
    best = {figure.name: best_of(figure, done) for figure in shown}
    for row in found:
        cells = [str(row[name]) for name in sweep.grid.axes]
        if row["error"]:
            table.add_row(*cells, *(["–"] * len(shown)), style="yellow")
            continue
        for figure in shown:
            text = shown_value(figure, row[figure.name])
            cells.append(f"[bold]{text}[/bold]" if best[figure.name] == row[figure.name] else text)
        table.add_row(*cells)
    console.print(fitted(table, console, [figure.head for figure in reversed(shown)]))
    if any(figure.name.endswith("_ms") for figure in shown):
        console.print("TTFT, ITL and E2E are means in ms, p50 and p99 those of TTFT.", style="dim", highlight=False)
    said = times(sweep)
    if said:
        console.print(said, style="dim", markup=False, highlight=False)
    for failure in sweep.failures:
        console.print(f"{failure.point.label}: {failure.why}", style="yellow", markup=False)
    for sentence in advice(sweep):
        console.print(sentence, markup=False, highlight=False)


def times(sweep: Sweep) -> str:
    """Where times come from, each once, with the points that have them where there are several."""
    by: dict[str, list[str]] = {}
    for point, report in sweep.done:
        if report.timing:
            by.setdefault("; ".join(map(timing_text, report.timing)), []).append(point.label)
    if not by:
        return ""
    if len(by) == 1:
        known = next(report for _, report in sweep.done if report.timing).timing_error is not None
        cancels = " An error that all points have cancels between them." if known and len(sweep.done) > 1 else ""
        return f"Times: {next(iter(by))}.{cancels}"
    alike = {(one.kind, one.error) for _, report in sweep.done for one in report.timing}
    some = [f"{text} ({labels[0]}{', ...' if len(labels) > 1 else ''})" for text, labels in by.items()]
    shown = 1 if len(alike) == 1 else MOST_TIMES
    more = (
        f"; and {len(some) - shown} more{' like it' if shown == 1 else ''}, in sweep.csv" if len(some) > shown else ""
    )
    return f"Times: {'; '.join(some[:shown])}{more}. Differences smaller than these errors may be theirs."


def shown_value(figure: Figure, value: float | int | None) -> str:
    """A figure for people."""
    if value is None:
        return "–"
    return percent(value) if figure.share else f"{value:,}" if isinstance(value, int) else measured(value)


def best_of(figure: Figure, done: Sequence[Mapping[str, Any]]) -> float | None:
    """The best value of a column; ``None`` where all are alike or none is better than another."""
    values: set[float] = {row[figure.name] for row in done if row[figure.name] is not None}
    if len(values) < 2 or not figure.best:
        return None
    return min(values) if figure.best == "low" else max(values)


def _says(name: str, done: list[dict[str, Any]]) -> bool:
    """Whether a column that is usually dull has something in it."""
    return name in DULL and any(row[name] for row in done)
