"""The curves of a sweep as a page: one file that needs no network. One setting runs along the axis, the others are lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvyard import __version__
from kvyard.lab.sweep.advice import advice
from kvyard.lab.sweep.axes import axis, axis_title, number_of, words
from kvyard.lab.sweep.runs import run_page
from kvyard.lab.sweep.table import DULL, FIGURES, Figure, rows, shown_value, times
from kvyard.replay.report import figures as draw
from kvyard.replay.report.html import Page, PageLink, answer, esc, head, listing, row, table, tile
from kvyard.replay.report.words import measured

if TYPE_CHECKING:
    from kvyard.lab.sweep.run import Sweep

DRAWN = (
    "ttft_mean_ms",
    "ttft_p99_ms",
    "reuse",
    "output_tokens_per_s",
    "e2e_mean_ms",
    "itl_mean_ms",
    "goodput_requests_per_s",
)
MOST_LINES = len(draw.RUN_COLORS)
MOST_TILES = 4

Curve = tuple[str, list[tuple[float, dict[str, Any]]]]
"""A name, and rows by where they are on the axis."""


def page(sweep: Sweep) -> str:
    """The page's text."""
    along = axis(sweep.grid.axes)
    others = [name for name in sweep.grid.axes if name != along]
    found = [one for one in rows(sweep) if not one["error"]]
    title = f"{words(along)}: what it buys" if along else "Settings compared"
    made = Page(f"{title} · kvyard")
    notes = []
    if sweep.missing:
        notes.append(f"{sweep.missing} of {len(sweep.grid.points)} points have not run yet.")
    notes += [f"{failure.point.label}: {failure.why}" for failure in sweep.failures]
    text = f"{len(found)} replays of {sweep.trace}, over " + " and ".join(
        f"{len(values)} values of {name}" for name, values in sweep.grid.axes.items()
    )
    made.add(head(title, text, notes, times(sweep)), answer(advice(sweep)))
    wanted = [
        figure for figure in FIGURES if figure.name in DRAWN and any(one[figure.name] is not None for one in found)
    ]
    wanted.sort(key=lambda figure: DRAWN.index(figure.name))
    if along:
        lines = _lines(along, others, found, axis_title(along, sweep.grid.axes[along])[1])
        if len(lines) > MOST_LINES:
            text = f"The first {MOST_LINES} of {len(lines)} lines; the table has them all."
            made.add(f'<p class="note">{esc(text)}</p>')
        if found:
            made.add('<div class="tiles">', *_tiles(along, lines[:MOST_TILES]), "</div>")
        title = axis_title(along, sweep.grid.axes[along])[0]
        charts = [made.figure(figure.title, _fitted(figure, lines), _curve(figure, title, lines)) for figure in wanted]
    else:
        charts = [made.figure(figure.title, "", _bars(figure, sweep, found)) for figure in wanted]
    made.cards("two", *charts)
    made.section(
        "All points", "Shares are of the prompt tokens of admitted requests. Each point has a page of its own."
    )
    made.add('<section class="card wide">' + _table(sweep) + "</section>")
    made.section("What was run", "What is not varied is the same at every point.")
    base = sweep.done[0][1]
    made.add('<section class="card">' + listing("Configuration of the first point", base.config) + "</section>")
    made.add(f"<footer>kvyard {esc(__version__)}</footer>")
    return made.text()


def _lines(along: str, others: Sequence[str], found: Sequence[dict[str, Any]], unit: float) -> list[Curve]:
    """By the values of the other settings: points along the axis, in its order."""
    lines: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for one in found:
        name = ", ".join(str(one[other]) if len(others) == 1 else f"{other} {one[other]}" for other in others) or "all"
        at = number_of(along, one[along])
        if at is not None:
            lines.setdefault(name, []).append((draw.digits(at * unit), one))
    return [(name, sorted(points, key=lambda point: point[0])) for name, points in lines.items()]


def _tiles(along: str, lines: Sequence[Curve]) -> Iterator[str]:
    """For each line, what its whole length buys."""
    for name, points in lines:
        first, last = points[0][1], points[-1][1]
        old, new = first["ttft_mean_ms"], last["ttft_mean_ms"]
        change = f" ({new / old - 1:+.1%})" if old else ""
        yield tile(
            f"TTFT: {name}, {along} {first[along]} to {last[along]}",
            f"{measured(old)} → {measured(new)}",
            "ms",
            f"mean{change} · reused {first['reuse']:.1%} → {last['reuse']:.1%}",
        )


def _fitted(figure: Figure, lines: Sequence[Curve]) -> str:
    """Said where the axis doesn't begin at 0, by the rule that the chart goes by."""
    values = [one[figure.name] for _, points in lines for _, one in points if one[figure.name] is not None]
    close = bool(values) and min(values) > 0 and max(values) - min(values) < 0.4 * max(values)
    return "the axis doesn't begin at 0" if close else ""


def _curve(figure: Figure, along: str, lines: Sequence[Curve]) -> draw.Figure:
    series = [
        draw.line(name, [_digits(one[figure.name]) for _, one in points], color, x=[at for at, _ in points])
        for (name, points), color in zip(lines, draw.RUN_COLORS)
    ]
    y = "share" if figure.share else "ms" if figure.name.endswith("_ms") else figure.head
    drawn = draw.lines(figure.title, series, along, y, dots=True, xMin=0, height=260, yFit=True)
    return drawn | draw.SHARE if figure.share else drawn


def _bars(figure: Figure, sweep: Sweep, found: Sequence[dict[str, Any]]) -> draw.Figure:
    bars = []
    for one in found:
        name = ", ".join(str(one[axis]) for axis in sweep.grid.axes)
        text = shown_value(figure, one[figure.name])
        part = {"name": figure.title, "color": "blue", "value": _digits(one[figure.name]) or 0, "text": text}
        bars.append({"name": name, "parts": [part], "text": text})
    drawn: draw.Figure = {"kind": "bars", "label": figure.title, "rows": bars, "xTitle": figure.title}
    return drawn | {"xFormat": "percent"} if figure.share else drawn


def _digits(value: float | None) -> float | None:
    return None if value is None else draw.digits(value)


def _table(sweep: Sweep) -> str:
    every = rows(sweep)
    kept = [figure for figure in FIGURES if figure.name not in DULL or any(one[figure.name] for one in every)]
    columns = [*sweep.grid.axes, *(figure.column for figure in kept)]
    made = []
    for one in every:
        cells: list[str | PageLink] = [str(one[name]) for name in sweep.grid.axes]
        if not one["error"]:
            cells[0] = PageLink(str(cells[0]), run_page(sweep, one["report"]))
        made.append(row([*cells, *(shown_value(figure, one[figure.name]) for figure in kept)]))
    return table(columns, made)
