"""``kvyard sweep``: a trace replayed at every combination of settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvyard.lab.study import Chart, Result, Row, Section, Study, Table, columns, own_options
from kvyard.lab.study.advice import Advice, Candidate, answer, at_edges, lowest_ttft, with_foresight
from kvyard.lab.study.axes import axis, axis_title, number_of, words
from kvyard.lab.study.certainty import evidence_of
from kvyard.lab.study.charts import MOST_LINES, Bar, Lines, bars, curves
from kvyard.lab.study.cost import fleet_size, foresees
from kvyard.lab.study.runs import run_page
from kvyard.replay.report.html import tile
from kvyard.replay.report.metrics import COST, METRICS, read_metrics
from kvyard.replay.report.slo import limits_of, violation
from kvyard.replay.report.words import limits as limits_text
from kvyard.replay.report.words import measured

SHOWN = ("ttft_mean", "ttft_p99", "itl_mean", "e2e_mean", "reuse", "reuse_host", "output_tokens_per_s")
DRAWN = ("ttft_mean", "ttft_p99", "reuse", "output_tokens_per_s", "e2e_mean", "itl_mean", "goodput_requests_per_s")
"""Metrics that are drawn, in the order in which people ask for them."""
MOST_TILES = 4


def sweep(
    trace: str | Path,
    vary: Mapping[str, Sequence[object]],
    *,
    folder: str | Path,
    config: str | Path | Mapping[str, object] | None = None,
    **more: Any,
) -> Study:
    """Replay ``trace`` at every combination of ``vary``, the rest by ``config`` and settings in ``more`` as for ``replay``.

    Reports go into ``folder``; those of equal points from an earlier run are taken as they are. ``more`` can have arguments of
    ``Study`` too: ``slo``, ``jobs``, ``executor``, how the trace is read, and callbacks. Raises as ``Study`` and ``vary`` do.
    """
    options, settings = own_options(more)
    study = Study(trace, folder, view, **options)
    study.vary(vary, config, settings)
    return study


def view(study: Study) -> Result:
    """Return the result of a sweep: a row per point, and curves along the setting that people ask about."""
    along = axis(study.grid.axes)
    values = {point.key: read_metrics(report) for point, report in study.done}
    said = advice(study)
    table = Table(
        rows=[
            Row(
                cells=dict(point.varied),
                values=values.get(point.key, {}),
                link=run_page(study, point) if point.key in values else "",
                failed=point.key not in values,
            )
            for point in study.points
        ],
        shown=tuple(dict.fromkeys((*SHOWN, *(limit.name for limit in limits_of(study.slo))))) if study.slo else SHOWN,
    )
    over = " and ".join(f"{len(values)} values of {name}" for name, values in study.grid.axes.items())
    charts, note = _charts(study, along, values)
    text = "Shares are of the prompt tokens of admitted requests. Each point has a page of its own."
    return Result(
        kind="sweep",
        title=f"{words(along)}: what it buys" if along else "Settings compared",
        about=f"{len(study.done)} replays of {study.trace}, over {over}",
        tables=[table] if study.done else [],
        rows=list(_rows(study, values)),
        facts={"trace": study.trace, "axes": study.grid.axes, "advice": said.sentences},
        advice=said.sentences,
        tiles=list(_tiles(study, along, values)),
        sections=[
            Section(title="By metric", text=note, charts=charts),
            Section(title="All points", text=text, table=table),
        ],
    )


def advice(study: Study) -> Advice:
    """Advise on the cheapest fleet that keeps the SLO; without one on the lowest TTFT. Without prices a fleet's cost is its
    size.
    """
    limits = limits_of(study.slo) if study.slo is not None else []
    fleets: dict[bool, list[Candidate]] = {False: [], True: []}
    for point, report in study.done:
        values = read_metrics(report)
        if values["ttft_mean"] is not None:
            fleet = Candidate(
                point.label,
                values,
                fleet_size(point.config),
                violation(values, limits) if limits else 0.0,
                evidence_of(report),
            )
            fleets[foresees(point.config)].append(fleet)
    if study.slo is not None:
        return answer(fleets[False], [COST], limits, wanted(study)).also(with_foresight(fleets[True]))
    said = lowest_ttft(fleets[False])
    edges = _edges(study, fleets[False]) if said.choice else {}
    return said.also(*at_edges(edges), with_foresight(fleets[True]))


def wanted(study: Study) -> str:
    """Return the SLO in words."""
    assert study.slo is not None
    pieces = []
    for limit in limits_of(study.slo):
        each = f"{limit.value:.0%} of requests within {limits_text(study.slo)}"
        pieces.append(each if limit.name == "within_slo" else str(limit))
    return " and ".join(pieces)


def _edges(study: Study, fleets: Sequence[Candidate]) -> dict[str, str]:
    """Axes with three values or more at whose last one the lowest TTFT is."""
    best = min(fleets, key=lambda fleet: (fleet.values["ttft_mean"] or 0.0, fleet.cost)).name
    varied = next(point.varied for point in study.points if point.label == best)
    found = {}
    for name, values in study.grid.axes.items():
        numbers = [number for value in values if (number := number_of(name, value)) is not None]
        if len(numbers) == len(values) > 2 and number_of(name, varied[name]) == max(numbers):
            found[f"{name}={varied[name]}"] = "high"
    return found


def _rows(study: Study, values: Mapping[str, Mapping[str, float | None]]) -> Iterator[dict[str, Any]]:
    for point in study.points:
        report = study.reports.get(point.key)
        stated = None if report is None else report.ranges.get("ttft_mean")
        yield {
            **point.varied,
            **columns(values.get(point.key, {})),
            "timing": None if report is None else "; ".join(timing.source for timing in report.timing),
            "timing_error": None if report is None else report.timing_error,
            "ttft_mean_low": None if stated is None else stated.low,
            "ttft_mean_high": None if stated is None else stated.high,
            "error": "" if report is not None else study.failures.get(point.key, "not run yet"),
            "report": f"points/{point.key}.json",
        }


def _lines(study: Study, along: str) -> dict[str, list[tuple[float, str]]]:
    """By the values of the other settings: places along the axis with the key of each point, in order."""
    others = [name for name in study.grid.axes if name != along]
    factor = axis_title(along, study.grid.axes[along])[1]
    lines: dict[str, list[tuple[float, str]]] = {}
    for point, _ in study.done:
        varied = point.varied
        name = ", ".join(varied[other] if len(others) == 1 else f"{other} {varied[other]}" for other in others) or "all"
        place = number_of(along, varied[along])
        if place is not None:
            lines.setdefault(name, []).append((place * factor, point.key))
    return {name: sorted(points) for name, points in lines.items()}


def _charts(
    study: Study, along: str | None, values: Mapping[str, Mapping[str, float | None]]
) -> tuple[list[Chart], str]:
    drawn = [METRICS[name] for name in DRAWN if any(metrics[name] is not None for metrics in values.values())]
    if along is None:
        labels = [(", ".join(point.varied.values()), values[point.key]) for point, _ in study.done]
        return [
            bars(metric, [Bar(name, metrics[metric.name]) for name, metrics in labels]) for metric in drawn
        ], "A bar per point."
    lines, title = _lines(study, along), axis_title(along, study.grid.axes[along])[0]
    note = "" if len(lines) <= MOST_LINES else f"The first {MOST_LINES} of {len(lines)} lines; the table has them all."

    def points(name: str) -> Lines:
        return {line: [(x, values[key][name]) for x, key in points] for line, points in lines.items()}

    return [curves(metric, points(metric.name), title) for metric in drawn], note or f"Along {along.replace('_', ' ')}."


def _tiles(study: Study, along: str | None, values: Mapping[str, Mapping[str, float | None]]) -> Iterator[str]:
    """For each line, what its whole length buys."""
    if along is None:
        return
    varied = {point.key: point.varied for point in study.points}
    for name, points in list(_lines(study, along).items())[:MOST_TILES]:
        (first, last), ttft, reuse = (points[0][1], points[-1][1]), METRICS["ttft_mean"], METRICS["reuse"]
        old, new = (values[key]["ttft_mean"] or 0.0 for key in (first, last))
        shares = " → ".join(f"{values[key]['reuse'] or 0.0:.1%}" for key in (first, last))
        yield tile(
            f"TTFT: {name}, {along} {varied[first][along]} to {varied[last][along]}",
            f"{measured(old)} → {measured(new)}",
            "ms",
            f"mean ({ttft.change_text(new, old) or '–'}) · {reuse.head} {shares}",
        )
