"""The timeline of a run: how many requests ran and waited and how full caches were, at points in time.

Nobody knows beforehand how long a run takes. So points are taken at a fixed distance, and whenever there are twice as many as
wanted every second one is dropped and the distance doubled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvyard.blocks.pool import Pool
from kvyard.replay.worker import Worker

FIRST_DISTANCE = 1_000_000_000


class Point(NamedTuple):
    """One worker at one instant."""

    running: int
    waiting: int
    loading: int
    device: float
    """Share of device blocks held by requests."""
    filled: float
    """Share of device blocks that hold something, be it for later."""
    host: float
    """The same of its host tier; 0 without one."""
    storage: float
    """The same of its storage tier."""


class Timeline:
    """Points of every worker, at growing distances."""

    def __init__(self, wanted: int) -> None:
        self.wanted = max(2, wanted)
        self.distance = FIRST_DISTANCE
        self.due = 0
        self.times: list[int] = []
        self.points: list[list[Point]] = []
        """Per instant, per worker."""

    def sample(self, now: int, workers: Sequence[Worker]) -> None:
        """Take a point of every worker."""
        row: list[Point] = []
        for worker in workers:
            if not worker.alive:
                row.append(Point(0, 0, 0, 0.0, 0.0, 0.0, 0.0))
                continue
            running = waiting = loading = 0
            used = filled = host = storage = 0.0
            for core in worker.cores:
                scheduler = core.scheduler
                running += len(scheduler.running)
                waiting += len(scheduler.waiting)
                if scheduler.loads is not None:
                    loading += len(scheduler.loads.parked)
                used += scheduler.manager.usage
                filled += _filled(scheduler.manager.pool)
                if core.offload is not None:
                    host += _filled(core.offload.host.pool)
                    if core.offload.storage is not None:
                        storage += _filled(core.offload.storage.pool)
            shares = (round(share / len(worker.cores), 6) for share in (used, filled, host, storage))
            row.append(Point(running, waiting, loading, *shares))
        self.times.append(now)
        self.points.append(row)
        if len(self.times) >= 2 * self.wanted:
            self.times = self.times[::2]
            self.points = self.points[::2]
            self.distance *= 2
        self.due = now - now % self.distance + self.distance

    def as_dict(self, names: Sequence[str]) -> dict[str, object]:
        """Columns: ``times_s``, and per quantity a list of values per worker."""
        columns: dict[str, object] = {"times_s": [at / 1e9 for at in self.times], "workers": list(names)}
        for index, field in enumerate(Point._fields):
            columns[field] = [[row[at][index] for row in self.points] for at in range(len(names))]
        return columns


def _filled(pool: Pool) -> float:
    return 1.0 - pool.unnamed / max(1, pool.num_blocks - 1)
