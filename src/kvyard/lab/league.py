"""``kvyard league``: every routing policy on one trace and one fleet, side by side.

A cell is a load with arrivals as recorded or spread; it has a table of standings, each the mean over seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvyard.lab.study import Result, Row, Section, Study, Table, columns, own_options
from kvyard.lab.study.advice import Advice, AdviceOption, front, least_behind, rejection_rule, rejections
from kvyard.lab.study.certainty import Evidence, evidence_of
from kvyard.lab.study.charts import Bar, bars
from kvyard.lab.study.runs import run_page
from kvyard.lab.study.seeds import means, not_set, spreads
from kvyard.lab.study.table import Values
from kvyard.replay.report.metrics import METRICS, read_metrics
from kvyard.replay.report.slo import Limit, limits_of, missed, violation
from kvyard.replay.traces import open_trace
from kvyard.router import POLICIES

LEFT_OUT = ("affinity", "program")
"""Policies that go by sessions, which most traces lack; they play where the trace has some, or if they are named."""
OVERLOADED = 0.5
"""A cell is overloaded if, under its best policy, requests queue for more than this share of their mean TTFT: the queue
decides then, and not the router."""
FRONT = (METRICS["ttft_mean"], METRICS["itl_p99"])
"""Goals of the Pareto front: what people wait for first, and what they notice afterwards."""
SHOWN = (
    *("reuse", "ttft_mean", "ttft_p90", "ttft_p99", "itl_mean", "itl_p99", "e2e_mean", "goodput_requests_per_s"),
    *("balance", "regret"),
)
DRAWN = ("ttft_mean", "itl_p99", "reuse")


class Standing(msgspec.Struct, frozen=True):
    """One policy in one cell."""

    policy: str
    values: Values
    """Means over seeds."""
    spread: float
    """The largest less the smallest mean TTFT over seeds, in milliseconds."""
    front: bool
    """True if no other policy of the cell beats it in ``FRONT``."""
    link: str
    """Page of its first run."""
    evidence: Evidence = Evidence()
    """Evidence of that run."""


def league(
    trace: str | Path,
    *,
    folder: str | Path,
    policies: Sequence[str] | None = None,
    loads: Sequence[float] = (1.0,),
    seeds: Sequence[int] = (0,),
    jitters: Sequence[str] = ("0",),
    config: str | Path | Mapping[str, object] | None = None,
    **more: Any,
) -> Study:
    """Replay ``trace`` under each of ``policies`` (all that make sense for the trace, unless given), at each of ``loads``
    (speed-ups of arrivals), with each of ``jitters`` and ``seeds``. ``more`` and errors are as for ``sweep``.
    """
    options, settings = own_options(more)
    asked = {"router": "--policies", "speedup": "--loads", "seed": "--seeds", "jitter": "--jitter"}
    not_set(asked, "a league", config, settings)
    names = list(policies) if policies is not None else _all_policies(trace)
    axes = {"router": names, "speedup": loads, "jitter": jitters, "seed": seeds}
    study = Study(trace, folder, view, **options)
    study.vary({name: [str(value) for value in values] for name, values in axes.items()}, config, settings)
    return study


def _all_policies(trace: str | Path) -> list[str]:
    first = next(iter(open_trace(trace, limit=1)), None)
    left_out = LEFT_OUT if first is None or first.session is None else ()
    return [name for name in POLICIES.names() if name not in left_out]


def view(study: Study) -> Result:
    """Return the result of a league: a table of standings per cell."""
    cells = standings(study)
    jammed = overloaded(cells)
    limits = limits_of(study.slo) if study.slo is not None else []
    recommendation = advice(cells, limits)
    if recommendation.choice and limits:
        recommendation = recommendation.also(
            rejection_rule(
                [AdviceOption(standing.policy, standing.values) for places in cells.values() for standing in places]
            )
        )
    tables = {
        cell: _table(f"{cell}; overloaded: its queues decide" if cell in jammed else cell, places, limits)
        for cell, places in cells.items()
    }
    text = "has the lowest mean TTFT. Starred: no policy has both a lower mean TTFT and a lower ITL p99."
    return Result(
        kind="league",
        title="Routing policies side by side",
        about=f"{len({place.policy for places in cells.values() for place in places})} policies on {study.trace}",
        tables=list(tables.values()),
        rows=[
            {
                "cell": cell,
                "policy": place.policy,
                "front": place.front,
                **columns(place.values),
                "ttft_spread_ms": place.spread,
            }
            for cell, places in cells.items()
            for place in places
        ],
        rows_key="standings",
        facts={"trace": study.trace, "overloaded": sorted(jammed), "advice": recommendation.sentences},
        advice=recommendation.sentences,
        met=bool(recommendation.choice) if limits and cells else None,
        legend="* no policy has both a lower mean TTFT and a lower ITL p99. "
        "Times are in ms unless a column says s, means over seeds.",
        sections=[
            Section(
                title=cell,
                text=f"{'Overloaded: its queues decide. ' if cell in jammed else ''}{places[0].policy} {text}",
                charts=[
                    bars(METRICS[name], [Bar(place.policy, place.values[name]) for place in places]) for name in DRAWN
                ],
                columns="three",
                table=tables[cell],
            )
            for cell, places in cells.items()
        ],
    )


def _table(title: str, places: Sequence[Standing], limits: Sequence[Limit]) -> Table:
    """Return the table of one cell."""
    rows = [
        Row(
            cells={
                "policy": f"{place.policy}{' *' if place.front else ''}",
                **({"SLO": "NOT met" if violation(place.values, limits) > 0 else "met"} if limits else {}),
            },
            values=place.values,
            link=place.link,
        )
        for place in places
    ]
    shown = tuple(dict.fromkeys((*(limit.name for limit in limits), *SHOWN)))
    return Table(rows=rows, title=title, shown=shown, changes=("ttft_mean",), base=places[0].values)


def standings(study: Study) -> dict[str, list[Standing]]:
    """Return the policies of each cell, the lowest mean TTFT first."""
    runs: dict[str, dict[str, list[Values]]] = {}
    links: dict[tuple[str, str], str] = {}
    evidence: dict[tuple[str, str], Evidence] = {}
    for point, report in study.done:
        cell, policy = cell_of(point.varied), point.varied["router"]
        runs.setdefault(cell, {}).setdefault(policy, []).append(read_metrics(report))
        links.setdefault((cell, policy), run_page(study, point))
        evidence.setdefault((cell, policy), evidence_of(report))
    cells = {}
    for cell, by_policy in runs.items():
        candidates = [AdviceOption(policy, means(results)) for policy, results in by_policy.items()]
        unbeaten = {candidate.name for candidate in front(candidates, FRONT)}
        places = []
        for candidate in candidates:
            name, spread = candidate.name, spreads(by_policy[candidate.name])["ttft_mean"] or 0.0
            places.append(
                Standing(name, candidate.values, spread, name in unbeaten, links[cell, name], evidence[cell, name])
            )
        cells[cell] = sorted(places, key=lambda place: (place.values["ttft_mean"] or 0.0, place.policy))
    return cells


def overloaded(cells: Mapping[str, Sequence[Standing]]) -> set[str]:
    """Return the cells whose queues decide."""
    best = {cell: places[0].values for cell, places in cells.items()}
    return {
        cell
        for cell, values in best.items()
        if (values["queue_mean"] or 0.0) > OVERLOADED * (values["ttft_mean"] or 0.0)
    }


def advice(cells: Mapping[str, Sequence[Standing]], limits: Sequence[Limit] = ()) -> Advice:
    """Advise on the policy to route by, over all cells whose queues don't decide: of those that keep ``limits`` in each. If
    none does, name the closest.
    """
    jammed = overloaded(cells)
    judged = {cell: places for cell, places in cells.items() if cell not in jammed} or cells
    options = {
        cell: [
            AdviceOption(place.policy, place.values, violation=violation(place.values, limits), evidence=place.evidence)
            for place in places
        ]
        for cell, places in judged.items()
    }
    wanted = " and ".join(map(str, limits))
    missing = {option.name for group in options.values() for option in group if option.violation > 0}
    kept = {cell: [option for option in group if option.name not in missing] for cell, group in options.items()}
    if missing and not any(kept.values()):
        worst = max(options.values(), key=lambda group: min(option.violation for option in group))
        best = min(worst, key=lambda option: option.violation)
        why = missed(best.values, limits)
        if not limits:
            return Advice("", [f"No policy can be recommended: {rejections(best.values)}."])
        sentence = f"No policy of {len(worst)} meets the SLO ({wanted}). The closest is {best.name}: {why}."
        return Advice("", [sentence]).also(rejection_rule(worst))
    recommendation = least_behind(kept)
    if limits and recommendation.choice:
        count = len({option.name for group in options.values() for option in group})
        recommendation = recommendation.also(f"{count - len(missing)} of {count} policies keep {wanted}.")
    left = "Overloaded loads are left out of this: their queues decide, and not the router."
    return recommendation.also(left if recommendation.choice and len(judged) < len(cells) else "")


def cell_of(varied: Mapping[str, str]) -> str:
    """Return the cell that a point belongs to, in words."""
    ticks = "" if varied["jitter"] in ("0", "0s") else f", ticks spread over {varied['jitter']}"
    return f"{float(varied['speedup']):g}x load{ticks}"
