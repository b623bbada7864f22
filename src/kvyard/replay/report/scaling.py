"""Report of an autoscaled fleet: its cost, its changes over time, and their effect on caches and the SLO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvyard.clock import SECOND
from kvyard.engine.price_list import default_prices
from kvyard.events.tier import LOWER_TIERS
from kvyard.integers import ceil_div
from kvyard.replay.report.fleet_report import ScalingCost, ScalingReport
from kvyard.replay.report.numbers import share
from kvyard.replay.report.report import Slo
from kvyard.replay.report.totals import FINISHED, good_rows

if TYPE_CHECKING:
    from kvyard.engine.timing.deployment import Deployment
    from kvyard.replay.config import ReplayConfig, WorkerConfig
    from kvyard.replay.fleet import Fleet
    from kvyard.replay.records import Records
    from kvyard.replay.report.totals import RecordTotals
    from kvyard.replay.scaling.autoscaler import ScalingAction

FLAP = 600 * SECOND
"""A scale-up that is undone within this time was not worth its start-up: the autoscaler flaps."""


def make_scaling(fleet: Fleet, totals: RecordTotals, end: int, windows: int, slo: Slo | None) -> ScalingReport | None:
    """Report what the autoscaler of ``fleet`` did; ``None`` if it has none. The run began at ``totals.start`` and ended at
    ``end``, in nanoseconds, which the report's series divides into ``windows``.
    """
    scaling = fleet.autoscaler
    if scaling is None:
        return None
    duration = max(1, end - totals.start)
    window = max(1, ceil_div(end - totals.start + 1, windows))
    costs: dict[str, float] = {role: scaling.on_seconds(role, fleet.now) for role in scaling.roles}
    cards = {role: seconds * _cards(fleet.config, role) for role, seconds in costs.items()}
    sums = totals.admitted
    computed = sums["input"] - sums["cached"] - sum(sums[tier.label] for tier in LOWER_TIERS)
    return ScalingReport(
        policy=scaling.config.policy,
        startup_s=scaling.config.startup / SECOND,
        worker_seconds=costs,
        mean_workers={role: seconds * SECOND / duration for role, seconds in costs.items()},
        actions=[(action.at_s, action.role, action.before, action.after) for action in scaling.actions],
        stops=scaling.stops,
        cancelled=scaling.cancelled,
        lost_blocks=scaling.lost_blocks,
        lost=share(
            sums["gone"],
            computed,
            "prompt tokens whose last copy went with a worker that was switched off / prompt tokens computed",
        ),
        card_seconds=cards,
        cost=_cost(fleet.config, cards),
        flaps=flaps(scaling.actions),
        flap_s=FLAP / SECOND,
        workers={
            role: _mean_on(scaling.spans(role, fleet.now), totals.start, window, windows) for role in scaling.roles
        },
        within_slo=[] if slo is None else _within_slo(fleet.records, slo, totals.start, window, windows),
    )


def flaps(actions: Sequence[ScalingAction]) -> int:
    """Return how many scale-ups were undone within ``FLAP``: as few workers of the role as before, or fewer."""
    return sum(
        up.after > up.before
        and any(
            down.role == up.role and down.after <= up.before and down.at_s - up.at_s <= FLAP / SECOND
            for down in actions[number + 1 :]
        )
        for number, up in enumerate(actions)
    )


def _cards(config: ReplayConfig, role: str) -> int:
    """Return the cards of a worker."""
    kind = next(kind for kind in config.workers if kind.engine.role == role)
    deployment = _deployment(kind)
    if deployment is None:
        return kind.dp_size
    return kind.dp_size * deployment.tensor_parallel_size * deployment.pipeline_parallel_size


def _deployment(kind: WorkerConfig) -> Deployment | None:
    """Return the model and the card that the timing of ``kind`` is made from; ``None`` for timing of no card."""
    return getattr(kind.engine.timing, "deployment", None)


def _cost(config: ReplayConfig, card_seconds: dict[str, float]) -> ScalingCost | None:
    prices, by_card, amount = default_prices(), {}, 0.0
    for kind in config.workers:
        deployment = _deployment(kind)
        price = None if deployment is None else prices.card(deployment.gpu)
        if deployment is None or price is None:
            return None
        by_card[deployment.gpu] = price
        amount += card_seconds[kind.engine.role] / 3600 * price
    return ScalingCost(amount=amount, currency=prices.currency, prices_of=prices.date, cards=by_card)


def _mean_on(spans: Sequence[tuple[int, int]], start: int, window: int, count: int) -> list[float]:
    """Return the mean number of workers that were on in each window."""
    edges = start + window * np.arange(count + 1, dtype=np.int64)
    on = np.zeros(count, dtype=np.float64)
    for first, last in spans:
        on += np.maximum(0, np.minimum(last, edges[1:]) - np.maximum(first, edges[:-1]))
    return [round(workers, 6) for workers in (on / window).tolist()]


def _within_slo(records: Records, slo: Slo, start: int, window: int, count: int) -> list[float | None]:
    arrived, good = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for part in records.parts():
        rows = part.rows
        arrived += np.bincount((rows["arrival"] - start) // window, minlength=count)
        done = rows[rows["status"] == FINISHED]
        done = done[good_rows(slo, done)]
        good += np.bincount((done["arrival"] - start) // window, minlength=count)
    return [
        kept / arrivals if arrivals else None for kept, arrivals in zip(good.tolist(), arrived.tolist(), strict=True)
    ]
