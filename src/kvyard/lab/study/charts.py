"""Charts of a metric: lines along a setting, bars by name, dots against something else."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from kvyard.lab.study.result import Chart
from kvyard.replay.report import figures as draw
from kvyard.replay.report.metrics import Metric
from kvyard.replay.report.slo import Limit

MOST_LINES = len(draw.RUN_COLORS)
CLOSE = 0.4
"""Lines that differ by less than this share are drawn on an axis that doesn't begin at 0."""
WIDE = 8.0
"""Lines of times that differ by more than this factor are drawn on a logarithmic axis."""
WIDE_DOTS = 3.0
"""As ``WIDE``, of dots: on a linear axis those near a limit would lie on each other."""
FAR = 3.0
"""A bar beyond this many medians is cut off, so that it doesn't flatten the others; a limit this far above all values isn't
drawn."""

ANSWER = "answer"
STANDINGS = {"SLO met": "blue", "SLO NOT met": "orange", ANSWER: "green"}
"""Colours of fleets against an SLO. The answer is drawn last, on top of the others."""

Lines = Mapping[str, Sequence[tuple[float, float | None]]]
"""Points along the axis and their values, by name of the line."""


class Bar(NamedTuple):
    """A value with its name."""

    name: str
    value: float | None
    color: str = "blue"
    remark: str = ""


class Dot(NamedTuple):
    """A point with the name that its tip shows."""

    x: float
    y: float
    name: str


class Dots(NamedTuple):
    """Points of one colour."""

    name: str
    points: Sequence[Dot]
    color: str
    large: bool = False
    joined: bool = False
    """A line leads from point to point."""


def curves(metric: Metric, lines: Lines, x_title: str, limit: Limit | None = None) -> Chart:
    """Return ``metric`` along a setting, with its ``limit`` as a line."""
    drawn = dict(list(lines.items())[:MOST_LINES])
    known = [value for points in drawn.values() for _, value in points if value is not None]
    axis = _Axis(metric, known, limit)
    series = [
        draw.line(name, [axis.place(value) for _, value in points], color, x=[draw.digits(x) for x, _ in points])
        for (name, points), color in zip(drawn.items(), draw.RUN_COLORS, strict=False)
    ]
    series += axis.limit_line([x for points in drawn.values() for x, _ in points])
    figure = draw.lines(axis.metric.label, series, x_title, axis.title, dots=True, xMin=0, height=260, **axis.format)
    return Chart(axis.heading, axis.text, figure)


def bars(metric: Metric, named: Sequence[Bar], title: str = "", text: str = "", limit: Limit | None = None) -> Chart:
    """Return a bar of ``metric`` for each of ``named``, and a mark at its ``limit``."""
    values = [bar.value or 0.0 for bar in named]
    end = _end(values)
    if end is not None and limit is not None and end < limit.value <= min(FAR * end, max(values)):
        end = limit.value * 1.15  # bars that cross the limit are seen to
        end = end if end < max(values) else None
    metric = metric.fitted(values if end is None else [end])
    marked = limit is not None and limit.value <= (FAR * max(values, default=0.0) if end is None else end)
    if limit is not None and not marked:
        where = "is far above" if end is None or limit.value > max(values) else "is in the part that is cut off"
        text = f"{text} The limit, {metric.limit_text(limit.value)}, {where}.".strip()
    if end is not None:
        beyond = ", ".join(bar.name for bar in named if (bar.value or 0.0) > end)
        text = f"{text} The axis ends at {metric.text(end, unit=True)}; cut off: {beyond}.".strip()
    figure = bars_of(
        [
            (bar.name, value * metric.factor, bar.color, _bar_text(metric, bar, end) + bar.remark)
            for bar, value in zip(named, values, strict=True)
        ],
        metric.label,
    )
    if end is not None:
        figure["cut"] = draw.digits(end * metric.factor)
    if limit is not None and marked:
        place = draw.digits(limit.value * metric.factor)
        figure["marks"] = [{"name": f"limit: {metric.limit_text(limit.value)}", "x": place}]
        figure["max"] = max(place, *(draw.digits(value * metric.factor) for value in values))
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


def dots(
    metric: Metric, groups: Sequence[Dots], x_title: str, title: str, limit: Limit | None = None, counts: bool = False
) -> Chart:
    """Return ``metric`` against something else, of which there are ``counts`` if so said, with its ``limit`` as a line."""
    groups = [group for group in groups if group.points]
    axis = _Axis(metric, [dot.y for group in groups for dot in group.points], limit, wide=WIDE_DOTS, close=1.0)
    series = []
    for group in groups:
        ordered = sorted(group.points)
        more: draw.Figure = {"dots": True} if group.joined and len(ordered) > 1 else {"only": "dots"}
        more |= {"x": [draw.digits(dot.x) for dot in ordered], "names": [dot.name for dot in ordered]}
        more |= {"large": True} if group.large else {}
        series.append(draw.line(group.name, [axis.place(dot.y) for dot in ordered], group.color, **more))
    places = [dot.x for group in groups for dot in group.points]
    if places:
        least, most = min(places), max(places)
        beside = 0.05 * (most - least) or 0.5 * most or 1.0
        ends = (least - beside, most + beside)
        series += axis.limit_line(ends)
    figure = draw.lines(f"{axis.metric.label} by {x_title}", series, x_title, axis.long, height=280, **axis.format)
    if counts:
        figure["xFormat"] = "count"
    if places:
        figure |= {"xMin": draw.digits(ends[0]), "xMax": draw.digits(ends[1])}
    legend = [{key: line[key] for key in ("name", "color", "dash", "only") if key in line} for line in series]
    return Chart(title, axis.text, figure | {"legend": legend})


class _Axis:
    """The vertical axis of a chart: its unit and scale by the values on it.

    It is logarithmic for times that differ by more than ``wide``, and doesn't begin at 0 for values that differ by less than
    ``close``.
    """

    def __init__(
        self, metric: Metric, values: Sequence[float], limit: Limit | None, wide: float = WIDE, close: float = CLOSE
    ) -> None:
        most = max(values, default=0.0)
        self._limit = limit if limit is not None and (metric.better == "high" or limit.value <= FAR * most) else None
        shown = [*values, self._limit.value] if self._limit is not None else list(values)
        least, most = min(shown, default=0.0), max(shown, default=0.0)
        log = metric.timed and least > 0 and most > wide * least
        fit = not log and least > 0 and most - least < close * most
        self.metric = metric if log else metric.fitted(shown)
        remarks = ["the axis is logarithmic"] if log else ["the axis doesn't begin at 0"] if fit else []
        if limit is not None and self._limit is None and values:
            remarks.append(f"the limit, {metric.limit_text(limit.value)}, is far above")
        self.text = "; ".join(remarks)
        self.heading = metric.title if log else self.metric.label
        unit = self.metric.unit if metric.timed else metric.head
        self.title = f"{metric.title} (log)" if log else "share" if metric.unit == "share" else unit
        self.long = self.title if log else self.heading
        self.format: draw.Figure = {"yScale": "log", "yFormat": "ms"} if log else _format(metric, "y")
        if fit:
            self.format |= {"yFit": True}

    def place(self, value: float | None) -> float | None:
        """Return where ``value`` lies."""
        return None if value is None else draw.digits(value * self.metric.factor)

    def limit_line(self, xs: Iterable[float]) -> list[draw.Figure]:
        """Return the line of the limit over ``xs``, if it is drawn."""
        ends = sorted(xs)
        if self._limit is None or not ends:
            return []
        place = self.place(self._limit.value)
        name = f"limit: {self.metric.limit_text(self._limit.value)}"
        span = [draw.digits(ends[0]), draw.digits(ends[-1])]
        return [draw.line(name, [place, place], "red", x=span, dash="6 4", dots=False)]


def _end(values: Sequence[float]) -> float | None:
    """Return the end of an axis of bars, if some would flatten the others."""
    near = [value for value in values if value <= FAR * median(values)] if values else []
    return max(near) * 1.15 if len(near) < len(values) and max(near, default=0.0) > 0 else None


def _bar_text(metric: Metric, bar: Bar, end: float | None) -> str:
    if end is not None and (bar.value or 0.0) > end:
        return metric.text(bar.value, unit=True)
    return metric.text(bar.value)


def _format(metric: Metric, axis: str) -> draw.Figure:
    return {f"{axis}Format": "percent"} if metric.unit == "share" else {}
