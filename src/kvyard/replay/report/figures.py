"""Figures of a page as plain descriptions: kind, data, axis titles with units, colours by name. ``page.js`` draws them.

Colours follow what they stand for, everywhere: cool ones for what was reused, warm ones for what need not have been computed,
grey for what could not have been known.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from kvyard.events.tier import LOWER_TIERS, Tier
from kvyard.integers import ceil_div
from kvyard.replay.report.bounds import BOUNDS
from kvyard.replay.report.numbers import Histogram
from kvyard.replay.report.report import LATENCIES, Report
from kvyard.replay.report.slo import WITHIN
from kvyard.replay.report.waterfall import lost_tokens
from kvyard.replay.report.words import REASONS, SHORT, SOURCES, percent

Figure = dict[str, Any]

COLORS = {
    **{tier.label: tier.entry.color for tier in Tier},
    "cached": "blue",
    "other_worker": "yellow",
    "evicted": "red",
    "left": "magenta",
    "never_seen": "grey",
    "partial_block": "grey2",
    "none": "grey2",
    "unknown": "grey2",
}
PROMPT_PARTS = SOURCES | {key: f"Computed: {text.lower()}" for key, text in REASONS.items()}
"""Parts of prompt tokens, in words."""
RUN_COLORS = ("blue", "orange", "aqua", "violet", "yellow", "magenta", "green", "red")
"""Colours of runs side by side, in order."""
POINTS = 150
"""Most points of a line."""
UNITS = ((10_800.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""From which length on time is counted in which unit."""
SHARE: Figure = {"yFormat": "percent"}
COUNT: Figure = {"yFormat": "count"}
"""Ticks are whole numbers."""
LATENCY: Figure = {"yTitle": "TTFT (log)", "yScale": "log", "yFormat": "ms"}


def lines(label: str, series: Sequence[Figure], x_title: str, y_title: str, **more: object) -> Figure:
    """Return lines over one axis each way. ``more`` are scales, units and formats."""
    return {"kind": "lines", "label": label, "series": series, "xTitle": x_title, "yTitle": y_title, **more}


def line(name: str, y: Sequence[float | None], color: str, **more: object) -> Figure:
    """Return a line, with ``x`` of its own if the figure has none."""
    return {"name": name, "y": y, "color": color, **more}


def time_axis(seconds: float) -> tuple[float, Figure]:
    """Return the divisor of times on an axis of this length, and its title and unit."""
    by, name = next((by, name) for least, by, name in UNITS if seconds >= least)
    return by, {"xTitle": f"{name} since the first arrival", "xUnit": name}


def digits(value: float) -> float:
    """Return ``value`` with as many digits as can be drawn."""
    return float(f"{value:.6g}")


def rounded(values: Sequence[float]) -> list[float]:
    """Return ``values`` with as many digits as can be drawn."""
    return list(map(digits, values))


def thinned(values: Sequence[float]) -> list[float]:
    """Return means of neighbours, so that there are no more than ``POINTS``."""
    return [value for value in coarse(values, ceil_div(len(values), POINTS) or 1) if value is not None]


def evenly(report: Report, rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return samples at equal distances. The fleet takes none while nothing happens; the latest sample holds until the next."""
    times = report.timeline.times_s
    count = min(POINTS, len(times))
    wanted = [max(0, bisect_right(times, (index + 0.5) / count * report.duration_s) - 1) for index in range(count)]
    return [[row[index] for index in wanted] for row in rows]


def coarse(values: Sequence[float | None], step: int) -> list[float | None]:
    """Return means of ``step`` neighbours each, without missing values; ``None`` if all are missing."""
    groups = [
        [value for value in values[start : start + step] if value is not None] for start in range(0, len(values), step)
    ]
    return [digits(sum(group) / len(group)) if group else None for group in groups]


def distribution(report: Report, key: str) -> Figure:
    """Return a histogram with its percentiles marked."""
    histogram = report.histograms.get(key, Histogram())
    spread = report.latency[key]
    marks = [{"x": value, "name": name} for name in ("p50", "p90", "p99") if (value := getattr(spread, name)) > 0]
    return {
        "kind": "histogram",
        "label": f"{LATENCIES[key]}: distribution",
        "ends": rounded(histogram.ends),
        "counts": histogram.counts,
        "zeros": histogram.zeros,
        "marks": marks if histogram.counts else [],
        "color": "blue",
        "xTitle": f"{SHORT[key]} (log)",
        "xFormat": "ms",
        "yTitle": "tokens" if key == "itl" else "requests",
        **COUNT,
        "none": "All were zero." if histogram.zeros else "There are none.",
    }


def all_latencies(report: Report) -> Figure:
    """Return the distribution functions of everything that is measured."""
    histograms = [
        (SHORT[key], color, report.histograms.get(key)) for key, color in zip(LATENCIES, RUN_COLORS, strict=False)
    ]
    return cumulative(histograms, "time (log)", "share up to there", "All latencies: cumulative")


def cumulative(histograms: Sequence[tuple[str, str, Histogram | None]], x: str, y: str, label: str) -> Figure:
    """Return distribution functions of histograms, each with its name and colour: ends of steps, and the share up to there."""
    series = []
    for name, color, histogram in histograms:
        if histogram is not None and histogram.counts:
            total = histogram.zeros + sum(histogram.counts)
            upto = accumulate(histogram.counts, initial=histogram.zeros)
            series.append(line(name, rounded([count / total for count in upto]), color, x=rounded(histogram.ends)))
    return lines(label, series, x, y, xScale="log", xTip="ms", xFormat="ms", yMax=1, height=220, **SHARE)


def first_tokens(report: Report) -> Figure:
    """Return time to first token, along time."""
    of = report.series
    series = [line("p99", of.ttft_p99, "orange"), line("p50", of.ttft_p50, "blue")]
    return _over_time(report, windows(report), series, "", "Time to first token by arrival") | LATENCY


def queues(report: Report) -> Figure:
    """Return requests in the fleet, along time."""
    values = report.timeline.values
    names = {"running": ("running", "blue"), "waiting": ("waiting", "orange")}
    if any(map(any, values.get("loading", []))):
        names["loading"] = ("loading", "aqua")
    return _sampled(report, names, False, "requests in the fleet", "Requests running and waiting") | COUNT


def cache_use(report: Report) -> Figure:
    """Return the occupancy of caches over time: means over workers."""
    names = {"device": ("device: held by requests", "blue"), "filled": ("device: held or cached", "yellow")}
    names |= {tier.label: (tier.label, tier.entry.color) for tier in LOWER_TIERS if tier.label in report.tiers}
    return _sampled(report, names, True, "share of blocks", "Cache use by tier") | SHARE | {"yMax": 1}


def _sampled(report: Report, names: Mapping[str, tuple[str, str]], mean: bool, y: str, label: str) -> Figure:
    """Return samples of the whole fleet: sums over workers, or means."""
    values = report.timeline.values
    series = [
        line(
            words,
            thinned([sum(column) / (len(column) if mean else 1) for column in zip(*values[key], strict=False)]),
            color,
        )
        for key, (words, color) in names.items()
        if key in values
    ]
    return _over_time(report, thinned(report.timeline.times_s), series, y, label)


def rates(report: Report) -> Figure:
    """Return requests coming and going, along time."""
    of = report.series
    series = [
        line(name, rounded([count / of.window_s for count in counts]), color)
        for name, counts, color in (("arriving", of.arrived, "blue"), ("finishing", of.finished, "orange"))
    ]
    return _over_time(report, windows(report), series, "requests per second", "Requests arriving and finishing")


def workers_on(report: Report) -> Figure:
    """Return workers that were on, along time, by role."""
    on = report.scaling.workers if report.scaling is not None else {}
    series = [
        line("workers" if role == "both" else f"{role} workers", rounded(counts), color)
        for (role, counts), color in zip(on.items(), RUN_COLORS, strict=False)
    ]
    return _over_time(report, windows(report), series, "workers", "Workers that were on") | COUNT


def offered(report: Report) -> Figure:
    """Return requests that arrived, along time."""
    arriving = rounded([count / report.series.window_s for count in report.series.arrived])
    series = [line("arriving", arriving, "blue")]
    return _over_time(report, windows(report), series, "requests per second", "Requests arriving")


def within_slo(report: Report) -> Figure:
    """Return share of the requests that kept the SLO, along time, with the share that must."""
    shares = report.scaling.within_slo if report.scaling is not None else []
    places = windows(report)
    series = [line("within the SLO", shares, "blue")]
    figure = _over_time(report, places, series, "share of requests", "Requests within the SLO")
    ends = [figure["x"][0], figure["x"][-1]]
    series.append(line(f"needed: {WITHIN:.0%}", [WITHIN, WITHIN], "red", x=ends, dash="6 4"))
    return figure | SHARE | {"yMax": 1}


def composition_over_time(report: Report) -> Figure:
    """Return the sources of prompt tokens over time."""
    prompts = report.series.prompts
    series = [line(words, prompts[key], COLORS[key]) for key, words in PROMPT_PARTS.items() if key in prompts]
    title = "Where prompt tokens came from, over time"
    figure = _over_time(report, windows(report), series, "share of prompt tokens", title)
    return figure | SHARE | {"kind": "area", "what": "prompt tokens"}


def composition(reports: Sequence[Report], names: Sequence[str]) -> Figure:
    """Return the sources of prompt tokens, a bar per run; with the bounds if there is one run."""
    rows, seen = [], set()
    for report, name in zip(reports, names, strict=False):
        parts = []
        for key, share in [*report.reuse.items(), *((key, report.missed_tokens.get(key)) for key in REASONS)]:
            if share is None or key == "all" or not share.part:
                continue
            seen.add(key)
            text = f"{percent(share.value)}, {share.part:,} of {share.whole:,}"
            part = {"name": PROMPT_PARTS[key], "color": COLORS[key], "value": digits(share.value), "text": text}
            parts.append(part)
        rows.append({"name": name, "parts": parts})
    figure: Figure = {
        "kind": "bars",
        "label": "Where prompt tokens came from",
        "rows": rows,
        "max": 1,
        "xFormat": "percent",
        "xTitle": "share of the prompt tokens of admitted requests",
        "legend": [{"name": text, "color": COLORS[key]} for key, text in PROMPT_PARTS.items() if key in seen],
    }
    return figure | {"names": False, "thick": 40, "marks": _bounds(reports[0])} if len(reports) == 1 else figure


FALLS = {
    "delivered": ("Delivered", "blue"),
    "worker": ("Lost at the worker", "orange"),
    "routed": ("Lost by routing", "yellow"),
    "pooled": ("Lost by eviction without foresight", "red"),
    "belady": ("Lost by too little room", "magenta"),
}
"""Parts of a waterfall, from what was left to what was lost first."""


def waterfalls(reports: Sequence[Report], names: Sequence[str]) -> Figure:
    """Return the losses of reuse, a bar per run that has bounds, as long as the reuse of an endless cache. A step that was
    a gain is subtracted from the losses after it.
    """
    rows, seen = [], set()
    for report, name in zip(reports, names, strict=False):
        levels = {step.level: step.tokens for step in report.waterfall.steps}
        all_tokens = report.reuse["all"].whole if levels else 0
        if not all_tokens:
            continue
        lost = lost_tokens(report)
        parts = [("delivered", levels["delivered"])]
        parts.append(
            ("worker", sum(tokens for level, tokens in lost.items() if level not in FALLS or level == "delivered"))
        )
        parts += [(level, lost.get(level, 0)) for level in ("routed", "pooled", "belady")]
        losses = []
        for key, tokens in parts:
            if tokens:
                seen.add(key)
                text = f"{percent(tokens / all_tokens)}, {tokens:,} tokens"
                losses.append(
                    {"name": FALLS[key][0], "color": FALLS[key][1], "value": digits(tokens / all_tokens), "text": text}
                )
        rows.append({"name": name, "parts": losses})
    return {
        "kind": "bars",
        "label": "Where the reuse went",
        "rows": rows,
        "xFormat": "percent",
        "xTitle": "share of the prompt tokens of admitted requests",
        "legend": [{"name": text, "color": color} for key, (text, color) in FALLS.items() if key in seen],
    }


def _bounds(report: Report) -> list[Figure]:
    """Return marks at what caches could have reached at best; equal bounds share one."""
    bounds = report.bounds
    merged: dict[str, list[str]] = {}
    for key in sorted(BOUNDS.keys() & bounds, key=lambda key: (-bounds[key].value, list(BOUNDS).index(key))):
        merged.setdefault(percent(bounds[key].value), []).append(key)
    return [
        {"x": bounds[keys[0]].value, "name": f"{value} at best: {', or '.join(BOUNDS[key].lower() for key in keys)}"}
        for value, keys in merged.items()
    ]


def heat(report: Report) -> Figure:
    """Return every quantity there is of every worker, along time."""
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
        **{tier.label: (f"{tier.label.capitalize()} filled", "") for tier in LOWER_TIERS},
    }
    for key, (name, of) in more.items():
        if key in sampled and (key in ("running", "waiting", "device", "filled") or any(map(any, sampled[key]))):
            layer: Figure = {"name": name, "unit": of, "values": evenly(report, sampled[key])}
            layers.append(layer if of else layer | {"format": "percent", "max": 1})
    by, axis = time_axis(report.duration_s)
    return {
        "kind": "heat",
        "label": "Load by worker and time",
        "rows": [worker.name for worker in report.workers],
        "layers": [layer for layer in layers if layer["values"] and layer["values"][0]],
        "from": 0,
        "to": digits(report.duration_s / by),
        **axis,
    }


def windows(report: Report) -> list[float]:
    """Return the middle of each window, in seconds."""
    return [(window + 0.5) * report.series.window_s for window in range(len(report.series.arrived))]


def _over_time(report: Report, seconds: Sequence[float], series: Sequence[Figure], y: str, label: str) -> Figure:
    by, axis = time_axis(report.duration_s)
    return lines(label, series, "", y, x=rounded([time / by for time in seconds]), xMin=0) | axis
