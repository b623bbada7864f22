"""``kvyard compare``: reports of several runs side by side, the first being what others are measured against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvyard.errors import KvyardError
from kvyard.integers import ceil_div
from kvyard.lab.study import Chart, Result, Row, Section, Table
from kvyard.lab.study.advice import AdviceOption, compared
from kvyard.replay.report import figures as draw
from kvyard.replay.report.metrics import Metric, read_metrics
from kvyard.replay.report.report import LATENCIES, TIERS, Report
from kvyard.replay.report.slo import Limit, judge
from kvyard.replay.report.words import SHORT, common_times, name_of

MOST = len(draw.RUN_COLORS)
"""Runs that a page can draw: as many as there are colours to tell apart."""
FEW_POINTS = 50
"""Points of a line over time, so that lines over each other can be followed."""
FEW_SETTINGS = 12
LONGEST = 60
"""Characters of a setting in the terminal."""


def compare(reports: Sequence[Report], names: Sequence[str] | None = None, limits: Sequence[Limit] = ()) -> Result:
    """Put ``reports`` side by side under ``names``, or their labels: a table of metrics, and charts of how they are distributed
    and went. The ``facts`` are what ``--json`` writes. ``limits`` are the SLO of all runs, instead of their own. Raises
    ``KvyardError`` for fewer than two.
    """
    if len(reports) < 2:
        raise KvyardError("comparing takes two reports or more")
    runs = unique(names or [name_of(report) for report in reports])
    rows = [Row(cells={"": run}, values=read_metrics(report)) for run, report in zip(runs, reports, strict=True)]
    table = Table(rows=rows, runs=runs)
    notes, timing = _notes(reports, runs), common_times(runs, reports)
    settings = differences([report.config for report in reports])
    sentences = compared([AdviceOption(run, row.values) for run, row in zip(runs, rows, strict=True)]).sentences
    met, verdict, missed = _slo(reports, runs, limits)
    changes = f"changes are against {runs[0]}, the yardstick, of shares in points of a percent."
    differ = "All else is the same in every run." if settings else "There is no difference."
    return Result(
        kind="compare",
        title=" vs ".join(runs) if len(runs) < 4 else f"{len(runs)} runs",
        about=_requests(reports),
        tables=[table],
        rows=[],
        facts={
            "runs": runs,
            "notes": notes,
            "timing": timing,
            "settings": settings,
            "lines": [_line(table, metric) for metric in table.metrics()],
            "verdict": sentences,
            "slo_met": met,
            "slo_missed": missed,
        },
        advice=[*missed, *sentences],
        met=met,
        verdict=verdict,
        notes=notes,
        times=timing,
        legend=f"* best, or within 0.5% of it; {changes}",
        remarks=_settings_text(settings),
        sections=[
            Section(title="In numbers", text=f"★ is best, or within 0.5% of it; {changes}", table=table),
            *_charts(reports, runs),
            Section(title="Set differently", text=differ, table=_settings_table(settings, runs)),
        ],
    )


def _slo(reports: Sequence[Report], runs: Sequence[str], limits: Sequence[Limit]) -> tuple[bool | None, str, list[str]]:
    """Return whether all runs that have an SLO meet it, which don't, and why; ``None`` if none has one."""
    verdicts = {run: judge(report, limits) for run, report in zip(runs, reports, strict=True)}
    judged = {run: verdict for run, verdict in verdicts.items() if verdict is not None}
    if not judged:
        return None, "", []
    bad = {run: verdict.why for run, verdict in judged.items() if not verdict.met}
    good = [run for run in judged if run not in bad]
    texts = [f"SLO met by {', '.join(good)}"] if good else []
    texts += [f"SLO NOT met by {', '.join(bad)}"] if bad else []
    return not bad, "; ".join(texts), [f"{run} misses the SLO: {why}." for run, why in bad.items()]


def _line(table: Table, metric: Metric) -> dict[str, Any]:
    """Return a metric over all runs, by run: values, changes against the first, and the numbers of the best."""
    values = [row.values[metric.name] for row in table.rows]
    about = {name: getattr(metric, name) for name in ("key", "title", "part", "unit", "better")}
    changes = [metric.change(value, values[0]) for value in values]
    return {**about, "values": values, "changes": changes, "best": table.best(metric)}


def unique(names: Sequence[str]) -> list[str]:
    """Return ``names`` with a number after those that occurred before."""
    taken: list[str] = []
    for name in names:
        unused, number = name, 2
        while unused in taken:
            unused, number = f"{name} #{number}", number + 1
        taken.append(unused)
    return taken


def differences(configs: Sequence[Mapping[str, object]]) -> dict[str, list[object]]:
    """Return the settings that differ, by path; null where a run lacks the setting."""
    different: dict[str, list[object]] = {}
    _differ("", list(configs), different)
    return different


def _differ(path: str, values: list[object], different: dict[str, list[object]]) -> None:
    inner = [_parts(value) for value in values]
    if all(part is not None for part in inner):
        for key in dict.fromkeys(key for part in inner if part is not None for key in part):
            _differ(
                f"{path}.{key}" if path else str(key), [part.get(key) for part in inner if part is not None], different
            )
    elif any(value != values[0] for value in values):
        different[path] = values


def _parts(value: object) -> Mapping[object, object] | None:
    """Return the settings that a setting is made of, if it is made of any."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list) and any(isinstance(part, Mapping) for part in value):
        return dict(enumerate(value))
    return None


def _notes(reports: Sequence[Report], runs: Sequence[str]) -> list[str]:
    notes = []
    first = reports[0]
    for report, run in zip(reports[1:], runs[1:], strict=True):
        if report.digest != first.digest:
            here, there = (
                f"{side.requests['all']:,} requests with {side.input_tokens:,} tokens" for side in (report, first)
            )
            notes.append(f"{run} had other requests to serve than {runs[0]}: {here}, not {there}.")
        if report.made_by != first.made_by:
            notes.append(f"{run} was made by kvyard {report.made_by}, {runs[0]} by {first.made_by}.")
        if report.goodput and first.goodput and report.goodput.slo_ms != first.goodput.slo_ms:
            notes.append(f"{run} and {runs[0]} have different SLOs: goodput can't be compared.")
        if (report.live is None) != (first.live is None):
            live, other = (run, runs[0]) if report.live is not None else (runs[0], run)
            notes.append(f"{live} was measured live, {other} simulated.")
    for report, run in zip(reports, runs, strict=True):
        if not report.complete:
            notes.append(f"{run} was interrupted: its figures cover what had happened until then.")
        elif report.requests.get("finished", 0) < report.requests["all"]:
            missing = report.requests["all"] - report.requests.get("finished", 0)
            notes.append(f"{run}: {missing:,} of {report.requests['all']:,} requests did not finish.")
    return notes


def _requests(reports: Sequence[Report]) -> str:
    first = reports[0]
    if any(report.digest != first.digest for report in reports):
        return "The runs served different requests"
    trace = first.trace.get("name")
    return f"{first.requests['all']:,} requests{f' of {trace}' if trace else ''}, the same for all"


def _settings_text(settings: Mapping[str, Sequence[object]]) -> list[str]:
    if not settings:
        return ["All runs have the same settings."]
    lines = ["Set differently:"]
    for path, values in list(settings.items())[:FEW_SETTINGS]:
        texts = [text if len(text) <= LONGEST else text[: LONGEST - 1] + "…" for text in map(_setting_text, values)]
        lines.append(f"  {path}: {' | '.join(texts)}")
    more = len(settings) - FEW_SETTINGS
    return [*lines, f"  and {more} more: --json has them all"] if more > 0 else lines


def _settings_table(settings: Mapping[str, Sequence[object]], runs: Sequence[str]) -> Table | None:
    rows = [
        Row(cells={"": path, **dict(zip(runs, map(_setting_text, values), strict=False))})
        for path, values in settings.items()
    ]
    return Table(rows=rows, long=True) if rows else None


def _setting_text(value: object) -> str:
    """Return a setting in words, without those parts of it that are not set."""
    if isinstance(value, dict):
        parts = {name: part for name, part in value.items() if part is not None and part not in ({}, [])}
        return ", ".join(
            f"{name} ({_setting_text(part)})" if isinstance(part, dict | list) else f"{name} {_setting_text(part)}"
            for name, part in parts.items()
        )
    if isinstance(value, list):
        return "; ".join(map(_setting_text, value))
    return "–" if value is None else str(value)


def _charts(reports: Sequence[Report], runs: Sequence[str]) -> list[Section]:
    sections = [
        Section(
            title="Where prompt tokens came from",
            text="Cool colours were reused, warm ones need not have been computed, grey ones had to.",
            charts=[Chart("Prompt tokens", "by first admission", draw.composition(reports, runs))],
            columns="one",
        )
    ]
    if any(report.waterfall.steps for report in reports):
        lost = "What an endless cache would have found, and what was lost of it: by room, eviction, routing, and at the worker."
        chart = Chart("Prompt tokens", "in steps", draw.waterfalls(reports, runs))
        sections.append(Section(title="Where the reuse went", text=lost, charts=[chart], columns="one"))
    latency = "The share of requests (of gaps, for ITL) that took no longer. Further left is better."
    shares = [
        Chart(LATENCIES[key], "cumulative", _cumulative(reports, runs, key)) for key in ("ttft", "e2e", "itl", "queue")
    ]
    over_time = [
        Chart(
            "Time to first token, median",
            "by arrival",
            _over_time(reports, runs, _first_tokens("ttft_p50"), "") | draw.LATENCY,
        ),
        Chart(
            "Time to first token, p99",
            "by arrival",
            _over_time(reports, runs, _first_tokens("ttft_p99"), "") | draw.LATENCY,
        ),
        Chart(
            "Prompt tokens reused",
            "from any tier, by first admission",
            _over_time(reports, runs, _reuse, "share of prompt tokens") | draw.SHARE,
        ),
        Chart("Requests waiting", "all workers together", _over_time(reports, runs, _waiting, "requests")),
    ]
    return [
        *sections,
        Section(title="Latency", text=latency, charts=shares),
        Section(title="Over time", text="Means of neighbouring windows of simulated time.", charts=over_time),
    ]


def _cumulative(reports: Sequence[Report], runs: Sequence[str], key: str) -> draw.Figure:
    histograms = [
        (run, color, report.histograms.get(key))
        for report, run, color in zip(reports, runs, draw.RUN_COLORS, strict=False)
    ]
    what = "gaps" if key == "itl" else "requests"
    x, y = f"{SHORT[key]} (log)", f"share of {what}"
    return draw.cumulative(histograms, x, y, LATENCIES[key]) | {"height": 260}


Timeline = tuple[Sequence[float], Sequence[float | None]]
"""Times in seconds, and the value at each."""


def _first_tokens(field: str) -> Callable[[Report], Timeline]:
    return lambda report: (draw.windows(report), getattr(report.series, field))


def _reuse(report: Report) -> Timeline:
    prompts = report.series.prompts
    reused = [counts for name, counts in prompts.items() if name in TIERS]
    parts, totals = (list(map(sum, zip(*counts, strict=False))) for counts in (reused, prompts.values()))
    shares = [part / total if total else None for part, total in zip(parts or [0] * len(totals), totals, strict=False)]
    return draw.windows(report), shares


def _waiting(report: Report) -> Timeline:
    samples = report.timeline
    return samples.times_s, list(map(sum, zip(*samples.values.get("waiting", []), strict=False)))


def _over_time(
    reports: Sequence[Report], runs: Sequence[str], read: Callable[[Report], Timeline], y: str
) -> draw.Figure:
    by, axis = draw.time_axis(max(report.duration_s for report in reports))
    series = []
    for run, color, report in zip(runs, draw.RUN_COLORS, reports, strict=False):
        times, values = read(report)
        step = ceil_div(len(values), FEW_POINTS) or 1
        kept = [time / by for time in draw.coarse(times[: len(values)], step) if time is not None]
        series.append(draw.line(run, draw.coarse(values, step), color, x=draw.rounded(kept)))
    return draw.lines("", series, "", y, xMin=0) | axis
