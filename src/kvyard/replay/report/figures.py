"""Figures of a page as plain descriptions: kind, data, axis titles with units, colours by name. ``page.js`` draws them.

Colours follow what they stand for, everywhere: cool ones for what was reused, warm ones for what need not have been computed,
grey for what nobody could have known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from kvyard.replay.report.bounds import BOUNDS
from kvyard.replay.report.numbers import Histogram
from kvyard.replay.report.report import LATENCIES, Report
from kvyard.replay.report.words import REASONS, SHORT, SOURCES, percent

Figure = dict[str, Any]

COLORS = {
    "device": "blue",
    "host": "aqua",
    "storage": "violet",
    "remote": "orange",
    "cached": "blue",
    "other_worker": "yellow",
    "evicted": "red",
    "never_seen": "grey",
    "partial_block": "grey2",
    "none": "grey2",
    "unknown": "grey2",
}
RUN_COLORS = ("blue", "orange", "aqua", "violet", "yellow", "magenta", "green", "red")
"""Of runs side by side, in order."""
POINTS = 150
"""Of a line, at most."""
UNITS = ((10_800.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""From which length on time is counted in which unit."""


def unit(seconds: float) -> tuple[float, str]:
    """What a time axis of this length is divided by, and its unit."""
    return next((by, name) for least, by, name in UNITS if seconds >= least)


def rounded(values: Sequence[float]) -> list[float]:
    """As many digits as can be drawn."""
    return [float(f"{value:.6g}") for value in values]


def thinned(values: Sequence[float]) -> list[float]:
    """Means of neighbours, so that there are no more than ``POINTS``."""
    step = -(-len(values) // POINTS) or 1
    lots = [values[at : at + step] for at in range(0, len(values), step)]
    return rounded([sum(lot) / len(lot) for lot in lots])


def evenly(report: Report, rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Samples at equal distances: the fleet takes none while nothing happens, and what it saw last holds until then."""
    times = report.timeline.times_s
    count = min(POINTS, len(times))
    wanted = [max(0, bisect_right(times, (at + 0.5) / count * report.duration_s) - 1) for at in range(count)]
    return [[row[at] for at in wanted] for row in rows]


def coarse(values: Sequence[float | None], step: int) -> list[float | None]:
    """Means of ``step`` neighbours each, of those that there are."""
    lots = [[one for one in values[at : at + step] if one is not None] for at in range(0, len(values), step)]
    return [float(f"{sum(lot) / len(lot):.6g}") if lot else None for lot in lots]


def distribution(report: Report, key: str) -> Figure:
    """A histogram with its percentiles marked."""
    found = report.histograms.get(key, Histogram())
    spread = report.latency[key]
    marks = [{"x": value, "name": name} for name in ("p50", "p90", "p99") if (value := getattr(spread, name)) > 0]
    return {
        "kind": "histogram",
        "label": f"{LATENCIES[key]}: distribution",
        "ends": rounded(found.ends),
        "counts": found.counts,
        "zeros": found.zeros,
        "marks": marks if found.counts else [],
        "color": "blue",
        "xTitle": f"{SHORT[key]}, milliseconds (log)",
        "yTitle": "tokens" if key == "itl" else "requests",
        "none": "All were zero." if found.zeros else "There are none.",
    }


def cumulative(found: Histogram) -> tuple[list[float], list[float]]:
    """The distribution function: ends of steps, and the share of values up to there."""
    total = found.zeros + sum(found.counts)
    upto, shares = found.zeros, [found.zeros / total] if total else []
    for count in found.counts:
        upto += count
        shares.append(upto / total)
    return rounded(found.ends), rounded(shares)


def all_latencies(report: Report) -> Figure:
    """The distribution functions of everything that is measured."""
    colors = dict(zip(LATENCIES, RUN_COLORS))
    series = []
    for key, words in LATENCIES.items():
        x, y = cumulative(report.histograms.get(key, Histogram()))
        if x:
            series.append({"name": SHORT[key], "x": x, "y": y, "color": colors[key], "title": words})
    return cumulative_figure(series, "milliseconds (log)", "share up to there", "All latencies: cumulative")


def cumulative_figure(series: list[Figure], x: str, y: str, label: str) -> Figure:
    """Distribution functions over one axis."""
    return {
        "kind": "lines",
        "label": label,
        "series": series,
        "xScale": "log",
        "xTitle": x,
        "xTip": "ms",
        "yTitle": y,
        "yFormat": "percent",
        "yMax": 1,
        "height": 220,
    }


def first_tokens(report: Report) -> Figure:
    """Time to first token, along time."""
    series = report.series
    lines = [("p99", series.ttft_p99, "orange"), ("p50", series.ttft_p50, "blue")]
    return _over_time(
        report,
        windows(report),
        [{"name": name, "y": values, "color": color} for name, values, color in lines],
        "TTFT, milliseconds (log)",
        "Time to first token by arrival",
    ) | {"yScale": "log", "yFormat": "ms"}


def queues(report: Report) -> Figure:
    """Requests in the fleet, along time."""
    values = report.timeline.values
    names = {"running": ("running", "blue"), "waiting": ("waiting", "orange"), "loading": ("loading", "aqua")}
    series: list[Figure] = [
        {"name": words, "y": thinned([sum(column) for column in zip(*values[key])]), "color": color}
        for key, (words, color) in names.items()
        if key in values and (key != "loading" or any(map(any, values[key])))
    ]
    return _over_time(
        report, thinned(report.timeline.times_s), series, "requests in the fleet", "Requests running and waiting"
    )


def cache_use(report: Report) -> Figure:
    """How full caches were, along time: means over workers."""
    values = report.timeline.values
    names = {
        "device": ("device: held by requests", "blue"),
        "filled": ("device: held or cached", "yellow"),
        "host": ("host", "aqua"),
        "storage": ("storage", "violet"),
        "remote": ("remote", "orange"),
    }
    series: list[Figure] = [
        {"name": words, "y": thinned([sum(column) / len(column) for column in zip(*values[key])]), "color": color}
        for key, (words, color) in names.items()
        if key in values and (key in ("device", "filled") or key in report.tiers)
    ]
    figure = _over_time(report, thinned(report.timeline.times_s), series, "share of blocks", "Cache use by tier")
    return figure | {"yFormat": "percent", "yMax": 1}


def rates(report: Report) -> Figure:
    """Requests coming and going, along time."""
    series = report.series
    lines = [("arriving", series.arrived, "blue"), ("finishing", series.finished, "orange")]
    return _over_time(
        report,
        windows(report),
        [
            {"name": name, "y": rounded([count / series.window_s for count in counts]), "color": color}
            for name, counts, color in lines
        ],
        "requests per second",
        "Requests arriving and finishing",
    )


def composition_over_time(report: Report) -> Figure:
    """Where prompt tokens came from, along time."""
    by, name = unit(report.duration_s)
    words = SOURCES | {key: f"Computed: {text.lower()}" for key, text in REASONS.items()}
    return {
        "kind": "area",
        "label": "Where prompt tokens came from, over time",
        "x": rounded([at / by for at in windows(report)]),
        "series": [
            {"name": words[key], "y": report.series.prompts[key], "color": COLORS[key]}
            for key in words
            if key in report.series.prompts
        ],
        "what": "prompt tokens",
        "xTitle": f"{name} since the first arrival",
        "xUnit": name,
        "yTitle": "share of prompt tokens",
        "yFormat": "percent",
    }


def composition(reports: Sequence[Report], names: Sequence[str]) -> Figure:
    """Where prompt tokens came from, a bar per run; the bounds where there is one run."""
    rows, seen = [], set()
    for report, name in zip(reports, names):
        parts = []
        for key, share in [*report.reuse.items(), *((key, report.missed_tokens.get(key)) for key in REASONS)]:
            if share is None or key == "all" or not share.part:
                continue
            seen.add(key)
            text = SOURCES.get(key) or f"Computed: {REASONS[key].lower()}"
            parts.append(
                {
                    "name": text,
                    "color": COLORS[key],
                    "value": float(f"{share.value:.6g}"),
                    "text": f"{percent(share.value)}, {share.part:,} of {share.whole:,}",
                }
            )
        rows.append({"name": name, "parts": parts})
    words = SOURCES | {key: f"Computed: {text.lower()}" for key, text in REASONS.items()}
    figure: Figure = {
        "kind": "bars",
        "label": "Where prompt tokens came from",
        "rows": rows,
        "max": 1,
        "xFormat": "percent",
        "xTitle": "share of the prompt tokens of admitted requests",
        "legend": [{"name": text, "color": COLORS[key]} for key, text in words.items() if key in seen],
    }
    if len(reports) == 1:
        figure |= {"names": False, "thick": 40}
        bounds = reports[0].bounds
        merged: dict[str, list[str]] = {}
        for key in sorted(bounds, key=lambda key: (-bounds[key].value, list(BOUNDS).index(key))):
            merged.setdefault(percent(bounds[key].value), []).append(key)
        figure["marks"] = [
            {
                "x": bounds[keys[0]].value,
                "name": f"{value} at best: {', or '.join(BOUNDS[key].lower() for key in keys)}",
            }
            for value, keys in merged.items()
        ]
    return figure


def heat(report: Report) -> Figure:
    """Every quantity there is of every worker, along time."""
    series, sampled = report.series, report.timeline.values
    layers: list[Figure] = [
        {"name": "Prompt tokens routed", "unit": "tokens per window", "values": series.routed_tokens},
        {"name": "Requests routed", "unit": "requests per window", "values": series.routed},
    ]
    more = {
        "running": ("Running", "requests"),
        "waiting": ("Waiting", "requests"),
        "loading": ("Loading", "requests"),
        "device": ("Device held", ""),
        "filled": ("Device held or cached", ""),
        "host": ("Host filled", ""),
        "storage": ("Storage filled", ""),
        "remote": ("Remote filled", ""),
    }
    for key, (name, of) in more.items():
        if key in sampled and (key in ("running", "waiting", "device", "filled") or any(map(any, sampled[key]))):
            layer: Figure = {"name": name, "unit": of, "values": evenly(report, sampled[key])}
            layers.append(layer if of else layer | {"format": "percent", "max": 1})
    by, name = unit(report.duration_s)
    return {
        "kind": "heat",
        "label": "Load by worker and time",
        "rows": [worker.name for worker in report.workers],
        "layers": [layer for layer in layers if layer["values"] and layer["values"][0]],
        "from": 0,
        "to": float(f"{report.duration_s / by:.6g}"),
        "xTitle": f"{name} since the first arrival",
        "xUnit": name,
    }


def windows(report: Report) -> list[float]:
    """The middle of each window, in seconds."""
    return [(at + 0.5) * report.series.window_s for at in range(len(report.series.arrived))]


def _over_time(report: Report, seconds: Sequence[float], series: list[Figure], y: str, label: str) -> Figure:
    by, name = unit(report.duration_s)
    return {
        "kind": "lines",
        "label": label,
        "x": rounded([at / by for at in seconds]),
        "series": series,
        "xMin": 0,
        "xTitle": f"{name} since the first arrival",
        "xUnit": name,
        "yTitle": y,
    }
