"""Prefill workers among those of a split fleet: a range that each replay narrows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from kvyard.lab.plan.shape import Alone
from kvyard.replay.report import Report
from kvyard.replay.report.answers import BEFORE
from kvyard.replay.report.slo import Limit

if TYPE_CHECKING:
    from kvyard.lab.plan.search import FleetOption

PREFILL, DECODE = "prefill", "decode"


class Ratios(msgspec.Struct):
    """Workers of each role that may be enough. Too few of one role stay too few, however many the other has."""

    share: float
    """Prefill workers of all, at the next try."""
    prefill: int = 1
    decode: int = 1

    @classmethod
    def estimated(cls, alone: Alone) -> Ratios:
        """Return the range before any replay, with the share of the work that is prefill."""
        return cls(alone.prefill_s / alone.busy_s if alone.busy_s else 0.5)

    @property
    def fewest(self) -> int:
        """Fewest workers that may be enough."""
        return self.prefill + self.decode

    def choose(self, workers: int) -> int | None:
        """Return the prefill workers to try; ``None`` if every ratio of ``workers`` has too few of a role."""
        if workers < self.fewest:
            return None
        return min(max(round(workers * self.share), self.prefill), workers - self.decode)

    def learn(self, fleet: FleetOption, slow: set[str]) -> bool:
        """Narrow the range by a fleet that misses the SLO; False if that isn't for one of its roles alone."""
        if len(slow) != 1:
            return False
        if PREFILL in slow:
            self.prefill = fleet.prefill + 1
        else:
            self.decode = fleet.workers - fleet.prefill + 1
        self.share = (self.prefill + fleet.workers - self.decode) / 2 / fleet.workers
        return True


def slow_roles(fleet: FleetOption, limits: Sequence[Limit]) -> set[str]:
    """Return the roles whose workers are too few for ``limits``."""
    missed = [limit.name for limit in limits if limit.violation(fleet.values.get(limit.name) or 0.0) > 0]
    gaps = [name for name in missed if name.startswith(("itl", "tpot"))]
    roles = {DECODE} if gaps else set()
    first = any(name.startswith("ttft") for name in missed)
    if first or (missed and not gaps):
        roles.add(_slower(fleet.report))
    return roles


def _slower(report: Report | None) -> str:
    """Return the role that first tokens wait for. A prompt keeps its prefill worker's blocks until a decode worker has room,
    so that the queue before prefill may be due to either.
    """
    if report is None or report.handovers is None:
        return PREFILL
    stages = report.handovers.stages
    after = sum(spread.mean for name, spread in stages.items() if name not in BEFORE)
    return DECODE if "prefill" in stages and after > stages["prefill"].mean else PREFILL
