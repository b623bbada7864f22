"""Runs side by side as a page."""

from collections.abc import Sequence
from pathlib import Path

from kvyard.errors import KvyardError
from kvyard.files import write_whole
from kvyard.replay.report import figures as draw
from kvyard.replay.report.compare import setting_text
from kvyard.replay.report.comparison import Comparison, change_text, value_text
from kvyard.replay.report.html import Page, answer, card, head, row, table
from kvyard.replay.report.report import LATENCIES, TIERS, Report
from kvyard.replay.report.words import SHORT

MOST = len(draw.RUN_COLORS)
"""Runs that a page can draw: as many as there are colours to tell apart."""
FEW_POINTS = 50


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
    title = " vs ".join(found.runs) if len(found.runs) < 4 else f"{len(found.runs)} runs"
    made.add(head(title, _line_of(reports), found.notes, found.timing))
    made.add(answer(found.verdict))
    made.section(
        "In numbers",
        f"{found.runs[0]} is the yardstick: changes are against it, of shares in points of a percent. ★ is best, or within "
        "0.5% of it.",
    )
    heads = ["", f"{found.runs[0]} (yardstick)", *(name for run in found.runs[1:] for name in (run, "change"))]
    made.cards("one", card("Measures", "", table(heads, _rows(found))))
    made.section(
        "Where prompt tokens came from",
        "Cool colours were reused, warm ones need not have been computed, grey ones had to.",
    )
    made.cards("one", made.figure("Prompt tokens", "by first admission", draw.composition(reports, found.runs)))
    if any(report.waterfall.steps for report in reports):
        made.section(
            "Where the reuse went",
            "What an endless cache would have found, and what was lost of it: by room, eviction, routing, and at the worker.",
        )
        made.cards("one", made.figure("Prompt tokens", "in steps", draw.waterfalls(reports, found.runs)))
    made.section("Latency", "The share of requests (of gaps, for ITL) that took no longer. Further left is better.")
    cards = [
        made.figure(LATENCIES[key], "cumulative", _cumulative(reports, found.runs, key))
        for key in ("ttft", "e2e", "itl", "queue")
    ]
    made.cards("two", *cards)
    made.section("Over time", "Means of neighbouring windows of simulated time.")
    made.cards(
        "two",
        made.figure("Time to first token, median", "by arrival", _first_tokens(reports, found.runs, "ttft_p50")),
        made.figure("Time to first token, p99", "by arrival", _first_tokens(reports, found.runs, "ttft_p99")),
        made.figure("Prompt tokens reused", "from any tier, by first admission", _reuse_over_time(reports, found.runs)),
        made.figure("Requests waiting", "all workers together", _waiting(reports, found.runs)),
    )
    made.section("Set differently", "All else is the same in every run.")
    rows = [row([path, *map(setting_text, values)]) for path, values in found.settings.items()]
    made.cards(
        "one", card("Settings", "" if rows else "There is no difference.", table(["", *found.runs], rows, long=True))
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
            rows.append(row([part, *([""] * (2 * len(found.runs) - 1))], "part"))
        cells, marks = [line.title], [""]
        for number in range(len(found.runs)):
            cells.append(value_text(line, number))
            marks.append("value best" if number in line.best else "value")
            if number:
                cells.append(change_text(line, number))
                marks.append("change")
        rows.append(row(cells, marks=marks))
    return rows


def _cumulative(reports: Sequence[Report], runs: Sequence[str], key: str) -> draw.Figure:
    found = [(run, color, report.histograms.get(key)) for report, run, color in zip(reports, runs, draw.RUN_COLORS)]
    what = "gaps" if key == "itl" else "requests"
    x, y = f"{SHORT[key]}, milliseconds (log)", f"share of {what}"
    return draw.cumulative(found, x, y, LATENCIES[key]) | {"height": 260}


def _first_tokens(reports: Sequence[Report], runs: Sequence[str], field: str) -> draw.Figure:
    values = [_coarse(draw.windows(report), getattr(report.series, field)) for report in reports]
    return _over_time(reports, runs, values, "") | draw.LATENCY


def _reuse_over_time(reports: Sequence[Report], runs: Sequence[str]) -> draw.Figure:
    values = []
    for report in reports:
        prompts = report.series.prompts
        reused = [counts for name, counts in prompts.items() if name in TIERS]
        parts, totals = (list(map(sum, zip(*counts))) for counts in (reused, prompts.values()))
        shares = [part / total if total else None for part, total in zip(parts or [0] * len(totals), totals)]
        values.append(_coarse(draw.windows(report), shares))
    return _over_time(reports, runs, values, "share of prompt tokens") | draw.SHARE


def _waiting(reports: Sequence[Report], runs: Sequence[str]) -> draw.Figure:
    samples = [report.timeline for report in reports]
    values = [_coarse(one.times_s, list(map(sum, zip(*one.values.get("waiting", []))))) for one in samples]
    return _over_time(reports, runs, values, "requests")


def _coarse(times: Sequence[float], values: Sequence[float | None]) -> tuple[list[float], list[float | None]]:
    """Fewer points, so that lines over each other can be followed: their times and values."""
    step = -(-len(values) // FEW_POINTS) or 1
    kept = [time for time in draw.coarse(times[: len(values)], step) if time is not None]
    return kept, draw.coarse(values, step)


def _over_time(
    reports: Sequence[Report],
    runs: Sequence[str],
    values: Sequence[tuple[Sequence[float], Sequence[float | None]]],
    y: str,
) -> draw.Figure:
    by, axis = draw.time_axis(max(report.duration_s for report in reports))
    series = [
        draw.line(run, shown, color, x=draw.rounded([at / by for at in times]))
        for run, color, (times, shown) in zip(runs, draw.RUN_COLORS, values)
    ]
    return draw.lines("", series, "", y, xMin=0) | axis
