"""``kvyard sweep``: a trace replayed at every combination of settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvyard.engine.price_list import default_prices
from kvyard.lab.study import Chart, Result, Row, Section, Study, Table, columns, own_options
from kvyard.lab.study.advice import Advice, AdviceOption, answer, at_edges, lowest_ttft, with_foresight
from kvyard.lab.study.axes import axis, axis_title, number_of, setting_text, words
from kvyard.lab.study.certainty import evidence_of
from kvyard.lab.study.charts import ANSWER, MOST_LINES, STANDINGS, Bar, Dot, Dots, Lines, bars, curves, dots
from kvyard.lab.study.cost import cards, fleet_size, foresees, list_price
from kvyard.lab.study.runs import run_page
from kvyard.lab.study.table import LEGEND
from kvyard.replay.report.html import tile
from kvyard.replay.report.metrics import COST, METRICS, read_metrics
from kvyard.replay.report.room import what_ifs
from kvyard.replay.report.slo import Limit, limits_of, violation
from kvyard.replay.report.words import latency
from kvyard.replay.report.words import limits as limits_text

SHOWN = ("ttft_mean", "ttft_p99", "itl_mean", "e2e_mean", "reuse", "reuse_host", "output_tokens_per_s")
DRAWN = ("ttft_mean", "ttft_p99", "reuse", "output_tokens_per_s", "e2e_mean", "itl_mean", "goodput_requests_per_s")
"""Metrics that are drawn, in the order in which people ask for them."""
MOST_TILES = 4
FRONTIER = "Each dot is a fleet that was replayed, the dashed line the limit."


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
    fleets = fleet_costs(study)
    values = {point.key: {**read_metrics(report), COST.name: fleets[point.key].price} for point, report in study.done}
    limits = limits_of(study.slo) if study.slo is not None else []
    recommendation = advice(study)
    table = Table(
        rows=[
            Row(
                cells={
                    **point.varied,
                    "cards": f"{fleets[point.key].cards:g}",
                    **(_standing(values.get(point.key), limits) if limits else {}),
                },
                values=values.get(point.key, {}),
                link=run_page(study, point) if point.key in values else "",
                failed=point.key not in values,
            )
            for point in study.points
        ],
        shown=tuple(dict.fromkeys((COST.name, *(limit.name for limit in limits), *SHOWN))),
    )
    over = " and ".join(f"{len(values)} values of {name}" for name, values in study.grid.axes.items())
    charts, note = _charts(study, along, values, limits)
    frontiers = _frontiers(study, fleets, values, limits, recommendation.choice)
    text = "Shares are of the prompt tokens of admitted requests. Each point has a page of its own."
    return Result(
        kind="sweep",
        title=f"{words(along)}: what it buys" if along else "Settings compared",
        about=f"{len(study.done)} replays of {study.trace}, over {over}",
        tables=[table] if study.done else [],
        rows=list(_rows(study, fleets, values)),
        facts={"trace": study.trace, "axes": study.grid.axes, "advice": recommendation.sentences},
        advice=recommendation.sentences,
        legend=f"{LEGEND} Cost is in {default_prices().currency} an hour, by prices of {default_prices().date}."
        if any(metrics[COST.name] is not None for metrics in values.values())
        else LEGEND,
        met=bool(recommendation.choice) if limits and study.done else None,
        tiles=[*_chosen(study, fleets, values, limits, recommendation.choice), *_tiles(study, along, values)],
        sections=[
            *([Section(title="Cost and the SLO", text=FRONTIER, charts=frontiers)] if frontiers else []),
            Section(title="By metric", text=note, charts=charts),
            Section(title="All points", text=text, table=table),
        ],
    )


def advice(study: Study) -> Advice:
    """Advise on the cheapest fleet that keeps the SLO; without one on the lowest TTFT. Where the price list doesn't have every
    card, a fleet's cost is its size. More blocks than a card holds are advised only where every point has them.
    """
    limits = limits_of(study.slo) if study.slo is not None else []
    fleets: dict[bool, list[AdviceOption]] = {False: [], True: []}
    costs = fleet_costs(study)
    held = [(point, report) for point, report in study.done if not what_ifs(report.config)]
    left_out = "What-ifs are not advised." if 0 < len(held) < len(study.done) else ""
    for point, report in held or study.done:
        values = read_metrics(report)
        if values["ttft_mean"] is not None:
            price = costs[point.key].price
            fleet = AdviceOption(
                point.label,
                values,
                fleet_size(point.config) if price is None else price,
                violation(values, limits) if limits else 0.0,
                evidence_of(report),
                default_prices().currency,
            )
            fleets[foresees(point.config)].append(fleet)
    if study.slo is not None:
        return answer(fleets[False], [COST], limits, wanted(study)).also(with_foresight(fleets[True]), left_out)
    recommendation = lowest_ttft(fleets[False])
    edges = _edges(study, fleets[False]) if recommendation.choice else {}
    return recommendation.also(*at_edges(edges), with_foresight(fleets[True]), left_out)


def wanted(study: Study) -> str:
    """Return the SLO in words."""
    assert study.slo is not None
    pieces = []
    for limit in limits_of(study.slo):
        each = f"{limit.value:.0%} of requests within {limits_text(study.slo)}"
        pieces.append(each if limit.name == "within_slo" else str(limit))
    return " and ".join(pieces)


def _edges(study: Study, fleets: Sequence[AdviceOption]) -> dict[str, str]:
    """Return axes with three values or more at whose last one the lowest TTFT is."""
    best = min(fleets, key=lambda fleet: (fleet.values["ttft_mean"] or 0.0, fleet.cost)).name
    varied = next(point.varied for point in study.points if point.label == best)
    edges = {}
    for name, values in study.grid.axes.items():
        numbers = [number for value in values if (number := number_of(name, value)) is not None]
        if len(numbers) == len(values) > 2 and number_of(name, varied[name]) == max(numbers):
            edges[f"{name}={varied[name]}"] = "high"
    return edges


def _rows(
    study: Study, fleets: Mapping[str, FleetCost], values: Mapping[str, Mapping[str, float | None]]
) -> Iterator[dict[str, Any]]:
    for point in study.points:
        report = study.reports.get(point.key)
        stated = None if report is None else report.ranges.get("ttft_mean")
        yield {
            **point.varied,
            "cards": fleets[point.key].cards,
            "cost": fleets[point.key].price,
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
        name = ", ".join(setting_text(other, varied[other]) for other in others) or "all"
        place = number_of(along, varied[along])
        if place is not None:
            lines.setdefault(name, []).append((place * factor, point.key))
    return {name: sorted(points) for name, points in lines.items()}


def _charts(
    study: Study, along: str | None, values: Mapping[str, Mapping[str, float | None]], limits: Sequence[Limit]
) -> tuple[list[Chart], str]:
    by_name = {limit.name: limit for limit in limits}
    names = dict.fromkeys((*by_name, *DRAWN))
    drawn = [METRICS[name] for name in names if any(metrics[name] is not None for metrics in values.values())]
    if along is None:
        labels = [
            (", ".join(setting_text(*pair) for pair in point.varied.items()), values[point.key])
            for point, _ in study.done
        ]
        return [
            bars(metric, [Bar(name, metrics[metric.name]) for name, metrics in labels], limit=by_name.get(metric.name))
            for metric in drawn
        ], "A bar per point."
    lines, title = _lines(study, along), axis_title(along, study.grid.axes[along])[0]
    note = "" if len(lines) <= MOST_LINES else f"The first {MOST_LINES} of {len(lines)} lines; the table has them all."

    def points(name: str) -> Lines:
        return {line: [(x, values[key][name]) for x, key in points] for line, points in lines.items()}

    return [
        curves(metric, points(metric.name), title, by_name.get(metric.name)) for metric in drawn
    ], note or f"Along {along.replace('_', ' ')}."


class FleetCost(NamedTuple):
    """Parts of a point's fleet, and their cost."""

    cards: float
    price: float | None
    """Per hour; ``None`` unless the price list has every card of the sweep."""


def fleet_costs(study: Study) -> dict[str, FleetCost]:
    """Return the fleets of all points by key. A fleet that scales counts with its mean size."""
    costs = {}
    for point in study.points:
        report, settings = study.reports.get(point.key), study.grid.settings(point)
        mean = None if report is None or report.scaling is None else report.scaling.mean_workers
        costs[point.key] = FleetCost(cards(settings, point.config, mean), list_price(settings, point.config, mean))
    if any(fleet.price is None for fleet in costs.values()):
        return {key: FleetCost(fleet.cards, None) for key, fleet in costs.items()}
    return costs


def _standing(values: Mapping[str, float | None] | None, limits: Sequence[Limit]) -> dict[str, str]:
    if values is None:
        return {"SLO": ""}
    return {"SLO": "NOT met" if violation(values, limits) > 0 else "met"}


def _frontiers(
    study: Study,
    fleets: Mapping[str, FleetCost],
    values: Mapping[str, Mapping[str, float | None]],
    limits: Sequence[Limit],
    choice: str,
) -> list[Chart]:
    """Return each limited metric against what the fleet costs, or its cards without prices."""
    priced = all(fleet.price is not None for fleet in fleets.values())
    places = {key: fleet.cards if fleet.price is None else fleet.price for key, fleet in fleets.items()}
    if len(set(places.values())) < 2:
        return []
    charts = []
    for limit in limits:
        groups: dict[str, list[Dot]] = {name: [] for name in STANDINGS}
        for point, _ in study.done:
            value = values[point.key][limit.name]
            if value is not None:
                met = violation(values[point.key], limits) <= 0
                kind = ANSWER if point.label == choice else "SLO met" if met else "SLO NOT met"
                groups[kind].append(Dot(places[point.key], value, point.label))
        drawn = [Dots(name, points, STANDINGS[name], name == ANSWER) for name, points in groups.items()]
        across = f"{default_prices().currency} an hour" if priced else "cards"
        title = f"{METRICS[limit.name].title} and {'cost' if priced else 'cards'}"
        charts.append(dots(METRICS[limit.name], drawn, across, title, limit, not priced))
    return charts


def _chosen(
    study: Study,
    fleets: Mapping[str, FleetCost],
    values: Mapping[str, Mapping[str, float | None]],
    limits: Sequence[Limit],
    choice: str,
) -> Iterator[str]:
    """Yield the fleet that keeps the SLO: its cards, its price, and its figures beside their limits."""
    for point, _ in study.done:
        if limits and point.label == choice:
            count, price = fleets[point.key]
            yield tile("Cards", f"{count:g}", "", point.label)
            if price is not None:
                by = default_prices()
                yield tile("Cost", f"{price:,.2f}", f"{by.currency} an hour", f"prices of {by.date}")
            for limit in limits:
                metric = METRICS[limit.name]
                yield tile(metric.title, metric.text(values[point.key][limit.name], unit=True), "", str(limit))


def _tiles(study: Study, along: str | None, values: Mapping[str, Mapping[str, float | None]]) -> Iterator[str]:
    """Yield, for each line, the gain over its whole length."""
    if along is None:
        return
    varied = {point.key: point.varied for point in study.points}
    for name, points in list(_lines(study, along).items())[:MOST_TILES]:
        (first, last), ttft, reuse = (points[0][1], points[-1][1]), METRICS["ttft_mean"], METRICS["reuse"]
        old, new = (values[key]["ttft_mean"] or 0.0 for key in (first, last))
        shares = " → ".join(f"{values[key]['reuse'] or 0.0:.1%}" for key in (first, last))
        yield tile(
            f"TTFT: {name}, {along} {varied[first][along]} to {varied[last][along]}",
            f"{latency(old)} → {latency(new)}",
            "",
            f"mean ({ttft.change_text(new, old) or '–'}) · {reuse.head} {shares}",
        )
