"""What hints are worth as a page: curves by recall, a line for each false rate. One file that needs no network."""

from __future__ import annotations

from collections.abc import Iterator

from kvyard import __version__
from kvyard.lab.hints.study import HintPoint, HintStudy
from kvyard.lab.hints.table import by_hint, censoring, gain_text, known, verdict
from kvyard.lab.sweep.table import Figure, shown_value, times
from kvyard.replay.report import figures as draw
from kvyard.replay.report.html import Page, esc, head, listing, row, table, tile
from kvyard.replay.report.words import measured

DRAWN = ("reuse", "ttft_mean_ms", "ttft_p90_ms", "ttft_p99_ms")


def page(study: HintStudy) -> str:
    """The page's text."""
    title = "What a hint is worth"
    made = Page(f"{title} · kvyard")
    notes = [censoring(study)]
    if study.sweep is not None:
        notes += [f"{failure.point.label}: {failure.why}" for failure in study.sweep.failures]
        if study.sweep.missing:
            notes.append(f"{study.sweep.missing} of {len(study.sweep.grid.points)} replays have not run yet.")
    text = f"{study.trace} on {study.setting}; means over seeds"
    made.add(head(title, text, notes, "" if study.sweep is None else times(study.sweep)))
    figures = known(study)
    for hint, points in by_hint(study).items():
        said = verdict(points)
        made.section(hint, f"{said[:1].upper()}{said[1:]}." if said else "Beside no hints at all.")
        made.add('<div class="tiles">', *_tiles(points), "</div>")
        wanted = [figure for figure in figures if figure.name in DRAWN]
        made.cards("two", *(made.figure(figure.title, "", _curve(figure, points)) for figure in wanted))
        made.add('<section class="card wide">' + _table(figures, points) + "</section>")
    if study.sweep is not None and study.sweep.reports:
        made.section("What was run", "What is not varied is the same for all.")
        base = study.sweep.done[0][1]
        made.add('<section class="card">' + listing("Configuration of the first point", base.config) + "</section>")
    made.add(f"<footer>kvyard {esc(__version__)}</footer>")
    return made.text()


def _tiles(points: list[HintPoint]) -> Iterator[str]:
    """No hints, and the best there is."""
    none = next((one for one in points if not one.recall and not one.false), None)
    best = max((one for one in points if not one.false), key=lambda one: one.recall, default=None)
    if none is None or best is None:
        return
    yield tile(
        "Reused",
        f"{none.figures['reuse']:.1%} → {best.figures['reuse']:.1%}",
        "",
        f"no hints → recall {best.recall:.0%}",
    )
    if "ttft_mean_ms" in none.figures:
        old, new = none.figures["ttft_mean_ms"], best.figures["ttft_mean_ms"]
        yield tile("Mean TTFT", f"{measured(old)} → {measured(new)}", "ms", f"{new / old - 1:+.1%}" if old else "")


def _curve(figure: Figure, points: list[HintPoint]) -> draw.Figure:
    lines: dict[float, list[HintPoint]] = {}
    for one in points:
        lines.setdefault(one.false, []).append(one)
    series = [
        draw.line(
            f"{false:.0%} false",
            [draw.digits(one.figures[figure.name]) for one in line],
            color,
            x=[one.recall for one in line],
        )
        for (false, line), color in zip(lines.items(), draw.RUN_COLORS)
    ]
    drawn = draw.lines(figure.title, series, "recall", "share" if figure.share else "ms", dots=True, xMin=0, height=260)
    return drawn | draw.SHARE if figure.share else drawn


def _table(figures: list[Figure], points: list[HintPoint]) -> str:
    made = []
    for one in points:
        cells = [f"{one.recall:.2f}", f"{one.false:.2f}"]
        for figure in figures:
            cells += [shown_value(figure, one.figures[figure.name]), gain_text(one, figure.name)]
        made.append(row(cells))
    heads = [name for figure in figures for name in (figure.column, "change")]
    return table(["recall", "false", *heads], made)
