"""The timeline of a run: how many requests ran and waited and how full caches were, at points in time.

How long a run takes isn't known beforehand. So points are taken at a fixed distance, and whenever there are twice as many as
wanted every second one is dropped and the distance doubled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvyard.blocks.pool import Pool
from kvyard.events.types import LOWER_TIERS
from kvyard.replay.worker import Worker

FIRST_DISTANCE = 1_000_000_000


class Sample(NamedTuple):
    """One worker at one instant."""

    running: int
    waiting: int
    loading: int
    device: float
    """Share of device blocks held by requests."""
    filled: float
    """Share of device blocks that hold something, be it for later."""
    lower: tuple[float, ...]
    """The same of its lower tiers, closest first."""


class SampleSeries:
    """Points of every worker, at growing distances."""

    def __init__(self, wanted: int) -> None:
        self.wanted = max(2, wanted)
        self.distance = FIRST_DISTANCE
        self.times: list[int] = []
        self.points: list[list[Sample]] = []
        """Per instant, per worker."""

    def sample(self, now: int, workers: Sequence[Worker]) -> int:
        """Take a point of every worker. Returns when to take the next."""
        row: list[Sample] = []
        for worker in workers:
            if not worker.alive:
                row.append(Sample(0, 0, 0, 0.0, 0.0, ()))
                continue
            running = waiting = loading = 0
            used = filled = 0.0
            depths = [len(core.offload.tiers) for core in worker.cores if core.offload is not None]
            lower = [0.0] * max(depths, default=0)
            for core in worker.cores:
                scheduler = core.scheduler
                running += len(scheduler.running)
                waiting += len(scheduler.waiting)
                if scheduler.loads is not None:
                    loading += len(scheduler.loads.parked)
                used += scheduler.manager.usage
                filled += _filled(scheduler.manager.pool)
                if core.offload is not None:
                    for level, tier in enumerate(core.offload.tiers):
                        lower[level] += _filled(tier.store.pool)
            used, filled, *lower = [round(share / len(worker.cores), 6) for share in (used, filled, *lower)]
            row.append(Sample(running, waiting, loading, used, filled, tuple(lower)))
        self.times.append(now)
        self.points.append(row)
        if len(self.times) >= 2 * self.wanted:
            self.times = self.times[::2]
            self.points = self.points[::2]
            self.distance *= 2
        return now - now % self.distance + self.distance

    def as_dict(self, names: Sequence[str]) -> dict[str, object]:
        """Columns: ``times_s``, and per quantity a list of values per worker."""
        columns: dict[str, object] = {"times_s": [at / 1e9 for at in self.times], "workers": list(names)}
        for index, field in enumerate(Sample._fields[:-1]):
            columns[field] = [[row[at][index] for row in self.points] for at in range(len(names))]
        lower = [[row[at].lower for row in self.points] for at in range(len(names))]
        depth = max((len(shares) for worker in lower for shares in worker), default=0)
        for level, tier in enumerate(LOWER_TIERS[: max(2, depth)]):  # host and storage always
            columns[tier.label] = [
                [shares[level] if level < len(shares) else 0.0 for shares in worker] for worker in lower
            ]
        return columns


def _filled(pool: Pool) -> float:
    return 1.0 - pool.unnamed / max(1, pool.num_blocks - 1)
