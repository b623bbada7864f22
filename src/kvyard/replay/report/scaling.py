"""What a fleet that scales says beyond others: what it cost, what was done when, and what that did to caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvyard.clock import SECOND
from kvyard.events.tier import LOWER_TIERS
from kvyard.replay.report.report import ScalingReport, share

if TYPE_CHECKING:
    from kvyard.replay.fleet import Fleet
    from kvyard.replay.report.totals import RecordTotals


def make_scaling(fleet: Fleet, totals: RecordTotals, duration: int) -> ScalingReport | None:
    """What the autoscaler of ``fleet`` did; ``None`` where it has none. ``duration`` is the run's, in nanoseconds."""
    scaling = fleet.autoscaler
    if scaling is None:
        return None
    end = fleet.now
    costs: dict[str, float] = {role: scaling.on_seconds(role, end) for role in scaling.roles}
    sums = totals.admitted
    computed = sums["input"] - sums["cached"] - sum(sums[tier.label] for tier in LOWER_TIERS)
    return ScalingReport(
        policy=scaling.config.policy,
        startup_s=scaling.config.startup / SECOND,
        worker_seconds=costs,
        mean_workers={role: seconds * SECOND / duration for role, seconds in costs.items()},
        actions=[(one.at_s, one.role, one.before, one.after) for one in scaling.actions],
        stops=scaling.stops,
        cancelled=scaling.cancelled,
        lost_blocks=scaling.lost_blocks,
        lost=share(
            sums["gone"],
            computed,
            "prompt tokens whose last copy went with a worker that was switched off / prompt tokens computed",
        ),
    )
