"""Charts of a metric: lines along a setting, bars by name, dots of two metrics."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvyard.lab.study.result import Chart
from kvyard.replay.report import figures as draw
from kvyard.replay.report.metrics import Metric

MOST_LINES = len(draw.RUN_COLORS)
CLOSE = 0.4
"""Lines that differ by less than this share are drawn on an axis that doesn't begin at 0, as page.js does."""

Lines = Mapping[str, Sequence[tuple[float, float | None]]]
"""Points along the axis and their values, by name of the line."""


class Bar(NamedTuple):
    """A value with its name."""

    name: str
    value: float | None
    color: str = "blue"
    remark: str = ""


def curves(metric: Metric, lines: Lines, x_title: str) -> Chart:
    """Return ``metric`` along a setting."""
    series = [
        draw.line(name, [_digits(value) for _, value in points], color, x=[draw.digits(x) for x, _ in points])
        for (name, points), color in zip(lines.items(), draw.RUN_COLORS, strict=False)
    ]
    known = [value for points in lines.values() for _, value in points if value is not None]
    close = bool(known) and min(known) > 0 and max(known) - min(known) < CLOSE * max(known)
    y_title = "share" if metric.unit == "share" else "ms" if metric.unit == "ms" else metric.head
    figure = draw.lines(metric.label, series, x_title, y_title, dots=True, xMin=0, height=260, yFit=True)
    return Chart(metric.label, "the axis doesn't begin at 0" if close else "", figure | _format(metric, "y"))


def bars(metric: Metric, named: Sequence[Bar], title: str = "", text: str = "") -> Chart:
    """Return a bar of ``metric`` for each of ``named``."""
    figure = bars_of(
        [(bar.name, bar.value or 0.0, bar.color, metric.text(bar.value) + bar.remark) for bar in named], metric.label
    )
    return Chart(title or metric.label, text, figure | _format(metric, "x"))


def bars_of(named: Sequence[tuple[str, float, str, str]], label: str) -> draw.Figure:
    """Return bars from name, value, colour and text of each."""
    rows = [
        {
            "name": name,
            "parts": [{"name": label, "color": color, "value": draw.digits(value), "text": text}],
            "text": text,
        }
        for name, value, color, text in named
    ]
    return {"kind": "bars", "label": label, "rows": rows, "xTitle": label}


def dots(metric: Metric, series: Sequence[Mapping[str, Any]], x_title: str, title: str, text: str = "") -> Chart:
    """Return ``metric`` against something else, a series of dots or lines each."""
    figure = draw.lines(f"{metric.label} by {x_title}", list(series), x_title, metric.label, height=280)  # type: ignore[arg-type]
    return Chart(title, text, figure | _format(metric, "y"))


def series(name: str, points: Sequence[tuple[float, float]], color: str, joined: bool = False) -> draw.Figure:
    """Return dots for ``dots``, from left to right; ``joined`` by a line."""
    ordered = sorted(points, key=lambda point: point[0])
    more: dict[str, Any] = {"dots": True} if joined and len(points) > 1 else {"only": "dots"}
    return draw.line(name, [draw.digits(y) for _, y in ordered], color, x=[draw.digits(x) for x, _ in ordered], **more)


def _format(metric: Metric, axis: str) -> draw.Figure:
    return {f"{axis}Format": "percent"} if metric.unit == "share" else {}


def _digits(value: float | None) -> float | None:
    return None if value is None else draw.digits(value)
