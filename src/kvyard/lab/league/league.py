"""The league: a sweep over routing policies, and what becomes of it: per cell (a load, ticks as recorded or spread) a table of
standings, each the mean over seeds.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from kvyard.errors import KvyardError
from kvyard.files import write_whole
from kvyard.lab.sweep import Sweep, sweep
from kvyard.lab.sweep.table import Figure, latency
from kvyard.replay.report import Report
from kvyard.router import POLICIES

LEFT_OUT = ("affinity",)
"""Policies that need what most traces don't have, a session with each request; they play where they are named."""
OVERLOADED = 0.5
"""A cell is overloaded where, under its best policy, requests wait for their turn for more than this share of their mean
TTFT: the queue decides then, and not the router."""

FIGURES = (
    Figure(
        "reuse", "reused", "Prompt tokens not computed / admitted", "high", lambda one: one.reuse["all"].value, True
    ),
    *(
        Figure(
            f"{name}_{field}_ms",
            field if field != "mean" else name.upper(),
            f"{name.upper()} {field}, ms",
            "low",
            latency(name, field),
        )
        for name in ("ttft", "itl", "e2e")
        for field in ("mean", "p50", "p90", "p99")
    ),
    Figure(
        "goodput_requests_per_s",
        "good/s",
        "Requests per second within the SLO",
        "high",
        lambda one: None if one.goodput is None else one.goodput.requests_per_s,
    ),
    Figure(
        "balance",
        "balance",
        "Prompt tokens of the busiest worker / mean",
        "low",
        lambda one: one.balance.get("max_over_mean"),
    ),
    Figure(
        "regret",
        "regret",
        "Cached blocks left on the table / seen",
        "",
        lambda one: None if one.router is None else one.router.regret.value,
        True,
    ),
    Figure("queue_mean_ms", "queue", "Mean wait for a turn, ms", "low", latency("queue", "mean")),
)
FRONT = ("ttft_mean_ms", "itl_p99_ms")
"""What the Pareto front is made of: what people wait for first, and what they notice afterwards."""


class LeaguePlace(msgspec.Struct, frozen=True):
    """One policy in one cell."""

    policy: str
    figures: dict[str, float | None]
    """By names of ``FIGURES``: means over seeds."""
    spread: float
    """The largest less the smallest mean TTFT over seeds, in milliseconds."""
    front: bool
    """Whether no other policy of the cell is better in one of ``FRONT`` and at least as good in the other."""


class League(msgspec.Struct, frozen=True):
    """Standings by cell, the soonest first token first."""

    sweep: Sweep
    cells: dict[str, list[LeaguePlace]]
    overloaded: frozenset[str]
    """Cells whose queues decide."""

    def show(self) -> None:
        """Print the tables."""
        from kvyard.lab.league.table import print_league

        print_league(self)

    def save(self) -> list[Path]:
        """Write ``league.csv``, ``league.json`` and ``league.html`` beside the points; returns where. Raises
        ``KvyardError``.
        """
        from kvyard.lab.league.page import page
        from kvyard.lab.league.table import write_csv, write_json
        from kvyard.lab.sweep.runs import write_runs

        paths = [self.sweep.folder / f"league.{kind}" for kind in ("csv", "json", "html")]
        write_csv(self, paths[0])
        write_json(self, paths[1])
        if self.cells:
            write_runs(self.sweep, paths[2].name, "All policies of the league")
            write_whole(paths[2], page(self))
        return paths if self.cells else paths[:2]


def league(
    trace: str | Path,
    *,
    folder: str | Path,
    policies: Sequence[str] | None = None,
    loads: Sequence[float] = (1.0,),
    seeds: Sequence[int] = (0,),
    jitters: Sequence[str] = ("0",),
    **how: Any,
) -> League:
    """Replay ``trace`` under each of ``policies`` (all that need no session, unless given), at each of ``loads`` (speed-ups of
    arrivals), with each of ``jitters`` and ``seeds``. ``how`` is what ``sweep`` takes besides, which raises for both.
    """
    names = list(policies) if policies is not None else [name for name in POLICIES.names() if name not in LEFT_OUT]
    settings = how.get("config")
    for axis, told in (("router", "--policies"), ("speedup", "--loads"), ("seed", "--seeds"), ("jitter", "--jitter")):
        if how.get(axis) is not None or (isinstance(settings, Mapping) and settings.get(axis) is not None):
            raise KvyardError(f"{axis} is what a league varies: say {told} instead")
    vary: dict[str, Sequence[object]] = {"router": names}
    for name, values in (("speedup", loads), ("jitter", jitters), ("seed", seeds)):
        vary[name] = [str(value) for value in values]
    return standings(sweep(trace, vary, folder=folder, **how))


def standings(done: Sweep) -> League:
    """What came of a sweep over ``router``, ``speedup``, ``jitter`` and ``seed``."""
    cells: dict[str, dict[str, list[Report]]] = {}
    for point, report in done.done:
        cells.setdefault(cell_of(point.varied), {}).setdefault(point.varied["router"], []).append(report)
    tables: dict[str, list[LeaguePlace]] = {}
    overloaded = set()
    for cell, by_policy in cells.items():
        means = {
            policy: {figure.name: _mean(figure.of(one) for one in reports) for figure in FIGURES}
            for policy, reports in by_policy.items()
        }
        table = [
            LeaguePlace(policy, figures, _spread(by_policy[policy]), _on_front(figures, means.values()))
            for policy, figures in means.items()
        ]
        table.sort(key=lambda one: (one.figures["ttft_mean_ms"] or 0.0, one.policy))
        tables[cell] = table
        best = table[0].figures
        if (best["queue_mean_ms"] or 0.0) > OVERLOADED * (best["ttft_mean_ms"] or 0.0):
            overloaded.add(cell)
    return League(done, tables, frozenset(overloaded))


def cell_of(varied: Mapping[str, str]) -> str:
    """The cell that a point of the sweep belongs to, in words."""
    speed, jitter = float(varied["speedup"]), varied["jitter"]
    ticks = "as recorded" if jitter in ("0", "0s") else f"ticks spread over {jitter}"
    return f"{speed:g}x load, {ticks}"


def _mean(values: Iterable[float | int | None]) -> float | None:
    found = [value for value in values if value is not None]
    return fmean(found) if found else None


def _spread(reports: Sequence[Report]) -> float:
    times = [one.latency["ttft"].mean for one in reports]
    return max(times) - min(times)


def _on_front(mine: Mapping[str, float | None], all_: Iterable[Mapping[str, float | None]]) -> bool:
    own = [mine[name] or 0.0 for name in FRONT]
    for other in all_:
        theirs = [other[name] or 0.0 for name in FRONT]
        if theirs != own and all(their <= our for their, our in zip(theirs, own, strict=True)):
            return False
    return True
