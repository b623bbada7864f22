"""What a sweep recommends, in plain words, and what that costs: workers, and memory of each kind. No prices: yours differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvyard.events.tier import LOWER_TIERS
from kvyard.lab.sweep.axes import number_of
from kvyard.replay.config import ReplayConfig
from kvyard.replay.fleet_memory import lower_bytes
from kvyard.replay.report import Report, Slo
from kvyard.replay.report.words import limits, measured

if TYPE_CHECKING:
    from kvyard.lab.sweep.grid import GridPoint
    from kvyard.lab.sweep.run import Sweep

WITHIN = 0.99
"""The share of requests within the SLO from which a point keeps it."""
NEAR = 0.05
"""A point whose mean TTFT is above the best by no more is as good, and may be cheaper."""
GIB = 1 << 30
ORACLE = "belady"
"""The eviction order that knows the future."""


class FleetCost(NamedTuple):
    """What a fleet is made of, the dearest first: fleets are ordered by this."""

    workers: int
    device: int
    """Blocks on all devices together."""
    lower: tuple[int, ...]
    """Bytes of each lower tier, all workers together, closest to the device first."""


def fleet_cost(config: ReplayConfig) -> FleetCost:
    """What the fleet of a replay is made of; a tier that workers share counts once."""
    counts = [kind.count for kind in config.workers]
    device = sum(kind.count * kind.dp_size * kind.engine.num_gpu_blocks for kind in config.workers)
    return FleetCost(sum(counts), device, tuple(map(int, lower_bytes(config, counts))))


def advice(sweep: Sweep) -> list[str]:
    """What to take, and what it costs; nothing where no point has run."""
    ran = [(point, report) for point, report in sweep.done if report.latency["ttft"].count]
    done = [(point, report) for point, report in ran if not _foresees(point.config)]
    if not done:
        return []
    said = [_within(sweep, done) if sweep.slo is not None else _soonest(done)]
    if sweep.slo is None and (edges := _edges(sweep, _best(done)[0])):
        said.append(edges)
    if len(done) < len(ran):
        point, report = _best([one for one in ran if _foresees(one[0].config)])
        mean = measured(report.latency["ttft"].mean)
        said.append(
            f"{point.label} knows the future, so it can't be had: with foresight the first token comes after {mean} ms."
        )
    return said


def _foresees(config: ReplayConfig) -> bool:
    """Whether a cache evicts by what comes next, as only a replay can."""
    engines = [kind.engine for kind in config.workers]
    orders = {engine.eviction for engine in engines}
    orders |= {tier.eviction for engine in engines if engine.tiers is not None for tier in engine.tiers.tiers}
    return ORACLE in orders


def _within(sweep: Sweep, done: list[tuple[GridPoint, Report]]) -> str:
    """The cheapest point that keeps the SLO, or the one that comes closest."""
    assert sweep.slo is not None
    kept = [(point, report) for point, report in done if _keeps(report, sweep.slo)]
    wanted = _wanted(sweep.slo)
    if not kept:
        point, report = max(done, key=lambda one: (_share(one[1]), -one[1].latency["ttft"].mean))
        within = f"{_share(report):.1%} of requests within {limits(sweep.slo)}"
        return f"No point keeps {wanted}. {point.label} comes closest, with {within}: {_cost(point)}."
    point, report = min(kept, key=lambda one: (fleet_cost(one[0].config), one[1].latency["ttft"].mean))
    of = f"of {len(done)} points {len(kept)} keep {wanted}"
    return f"Take {point.label}: {of}, and this is the cheapest: {_cost(point)}."


def _keeps(report: Report, slo: Slo) -> bool:
    good = report.goodput
    if good is None or (good.percentiles and not all(one.met for one in good.percentiles.values())):
        return False
    if slo.percentiles and report.requests.get("finished", 0) < report.requests["all"]:
        return False  # percentiles are of requests that finished
    return not _each(slo) or _share(report) >= WITHIN


def _each(slo: Slo) -> bool:
    """Whether it limits each request by itself."""
    return any(getattr(slo, name) is not None for name in ("ttft", "itl", "e2e"))


def _wanted(slo: Slo) -> str:
    """An SLO in words."""
    pieces = [f"{WITHIN:.0%} of requests within {limits(slo)}"] if _each(slo) else []
    for name, ms in (slo.percentiles or {}).items():
        kind, _, percentile = name.partition("_")
        pieces.append(f"{kind.upper()} {percentile} ≤ {ms:g} ms")
    return " and ".join(pieces)


def _soonest(done: list[tuple[GridPoint, Report]]) -> str:
    """The point with the soonest first token, and the cheapest that is nearly as good."""
    best, report = _best(done)
    least = report.latency["ttft"].mean
    near = [one for one in done if one[1].latency["ttft"].mean <= least * (1 + NEAR)]
    point, cheap = min(near, key=lambda one: (fleet_cost(one[0].config), one[1].latency["ttft"].mean))
    soonest = f"the soonest first token ({measured(least)} ms on average)"
    if point is best or fleet_cost(point.config) == fleet_cost(best.config):
        return f"Take {best.label}: {soonest}, and none within {NEAR:.0%} of it is cheaper: {_cost(best)}."
    mean = measured(cheap.latency["ttft"].mean)
    cheapest = f"Within {NEAR:.0%} of it, {point.label} is the cheapest: {mean} ms, {_cost(point)}."
    return f"{best.label} has {soonest}: {_cost(best)}. {cheapest}"


def _best(done: list[tuple[GridPoint, Report]]) -> tuple[GridPoint, Report]:
    return min(done, key=lambda one: (one[1].latency["ttft"].mean, fleet_cost(one[0].config)))


def _share(report: Report) -> float:
    """Of all requests, those that finished within the SLO."""
    return report.goodput.requests.part / report.requests["all"] if report.goodput is not None else 0.0


def _cost(point: GridPoint) -> str:
    cost = fleet_cost(point.config)
    pieces = [f"{cost.workers:,} worker{'s' if cost.workers != 1 else ''}", f"{cost.device:,} device blocks"]
    pieces += [f"{held / GIB:,.1f} GiB of {tier.place}" for tier, held in zip(LOWER_TIERS, cost.lower) if held]
    return f"{', '.join(pieces[:-1])} and {pieces[-1]} in all"


def _edges(sweep: Sweep, best: GridPoint) -> str:
    """Axes with three values or more at whose last one the best point is: beyond it may be better."""
    found = []
    for name, values in sweep.grid.axes.items():
        numbers = [number for value in values if (number := number_of(name, value)) is not None]
        if len(numbers) == len(values) > 2 and number_of(name, best.varied[name]) == max(numbers):
            found.append(f"{name}={best.varied[name]}")
    if not found:
        return ""
    return f"The soonest first token is at the edge of the grid ({', '.join(found)}): more may be sooner still."
