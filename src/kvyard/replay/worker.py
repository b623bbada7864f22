"""A worker of a simulated fleet: its engine, its state and its counts; and samples of all workers over time.

The duration of a run isn't known beforehand. So samples are taken at a fixed interval; whenever there are twice as many as
wanted, every second one is dropped and the interval doubled.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from kvyard.blocks import NO_HINTS
from kvyard.blocks.pool import Pool
from kvyard.engine.core import EngineCore
from kvyard.engine.job import Job
from kvyard.engine.ranks import Ranks
from kvyard.engine.role import Role
from kvyard.events.tier import LOWER_TIERS
from kvyard.index import Holder
from kvyard.replay.config import WorkerConfig
from kvyard.replay.facts import heeded
from kvyard.replay.recorder import Recorder
from kvyard.router.pace import Pace

FIRST_DISTANCE: Final = 1_000_000_000


class Worker:
    """One engine with one or more ranks. The fleet drives it through ``engine`` and finds its ranks by number."""

    def __init__(
        self,
        number: int,
        kind: WorkerConfig,
        pace: Pace | None,
        cores: list[EngineCore],
        recorders: list[Recorder],
        jobs: dict[str, Job],
        touched: set[int],
    ) -> None:
        """``jobs``, which the watchers of its ranks share, are those that are here and not through. ``touched`` are the fleet's
        workers that may start a pass.
        """
        self.number = number
        self.name = f"{kind.name}{number}"
        self.role: Role = kind.engine.role
        self.block_size = min([spec.block_size for spec in kind.engine.specs])
        """Tokens per block of its requests' chains."""
        self.tokens_per_pass = kind.engine.tokens_per_pass
        """Prompt tokens that it computes in one pass at most."""
        self.pace = pace
        """Its speed, where a router asks for it."""
        self.cores = cores
        self.recorders = recorders
        self.holders = [Holder(self.name, rank) for rank in range(len(cores))]
        """Its ranks as index and routers call them."""
        self.engine: EngineCore | Ranks = cores[0] if len(cores) == 1 else Ranks(cores)
        self.jobs = jobs
        self.capacity = sum([core.scheduler.manager.pool.num_blocks - 1 for core in cores]) * self.block_size
        """Tokens that fit on its devices."""
        self.began = False
        """True if it ever took requests."""
        self.alive = True
        self.draining = False
        """True if it takes no new requests."""
        self._touched = touched

    def touch(self) -> None:
        """Note that something happened to the worker: it may start a pass at the end of this instant."""
        self._touched.add(self.number)

    def name_of(self, rank: int) -> str:
        """Return the name of a rank in records: a worker with one rank goes by its own name."""
        return self.name if len(self.cores) == 1 else str(self.holders[rank])

    def submit(self, job: Job, now: int, rank: int) -> None:
        """Submit ``job`` to a rank."""
        self.engine.advance(now)
        self.jobs[job.id] = job
        if job.hints is not NO_HINTS:
            job.hints = heeded(job.hints, self.cores[rank].scheduler.manager)
            job.retention = job.hints.retention
        engine = self.engine
        if isinstance(engine, Ranks):
            engine.submit(job, now, rank)
        else:
            engine.submit(job, now)
        self.touch()

    def withdraw(self, job: Job, now: int, rank: int) -> None:
        """Have a rank give ``job`` up, whose end then concerns no one: its request goes on elsewhere."""
        del self.jobs[job.id]
        engine = self.engine
        engine.advance(now)
        if isinstance(engine, Ranks):
            engine.cancel(job, now, rank)
        else:
            engine.cancel(job, now)

    def tier_counters(self) -> dict[str, int]:
        """Return counters of its lower tiers, all ranks together; empty without any."""
        total: Counter[str] = Counter()
        for core in self.cores:
            if core.offload is not None:
                total.update(core.offload.counters.flat())
        return dict(total)


class Sample:
    """One worker at one instant."""

    __slots__ = ("device", "filled", "loading", "lower", "running", "waiting")

    def __init__(self) -> None:
        self.running = 0
        self.waiting = 0
        self.loading = 0
        self.device = 0.0
        """Share of device blocks held by requests."""
        self.filled = 0.0
        """Share of device blocks that hold something, be it for later."""
        self.lower: list[float] = []
        """Shares of the blocks of its lower tiers that hold something, closest tier first."""


class SampleSeries:
    """Points of every worker, at growing distances."""

    def __init__(self, wanted: int) -> None:
        self.wanted = max(2, wanted)
        self.distance = FIRST_DISTANCE
        self.times: list[int] = []
        self.points: list[list[Sample]] = []
        """Per instant, per worker."""
        self._last: list[Sample] = []
        self._since = 0
        """Time of the latest point."""
        self.held = 0.0
        """Token-nanoseconds that requests held on devices, all workers together, as of the latest point,"""
        self.cached = 0.0
        """and those of what was cached while none held it."""

    def add_up(self, now: int, workers: Sequence[Worker]) -> None:
        """Add the time since the latest point to ``held`` and ``cached``, as if nothing had changed since."""
        passed, self._since = now - self._since, now
        held = cached = 0.0
        for sample, worker in zip(self._last, workers):
            if sample.filled:
                held += sample.device * worker.capacity
                cached += (sample.filled - sample.device) * worker.capacity
        self.held += held * passed
        self.cached += cached * passed

    def sample(self, now: int, workers: Sequence[Worker], changed: Iterable[int] | None = None) -> int:
        """Take a point of every worker. Workers that haven't ``changed``, where numbers are given, keep their latest point.
        Returns when to take the next.
        """
        self.add_up(now, workers)
        row: list[Sample] = []
        if changed is None or len(self._last) != len(workers):
            changed = range(len(workers))
            row = [_NOTHING] * len(workers)
        else:
            row = self._last.copy()
        for number in changed:
            worker = workers[number]
            sample = Sample()
            row[number] = sample
            if not worker.alive:
                continue
            ranks = len(worker.cores)
            for core in worker.cores:
                scheduler = core.scheduler
                sample.running += len(scheduler.running)
                sample.waiting += len(scheduler.waiting)
                sample.loading += len(scheduler.jobs.parked)
                sample.device += scheduler.manager.usage
                sample.filled += _filled(scheduler.manager.pool)
                if core.offload is not None:
                    for level, tier in enumerate(core.offload.tiers):
                        if level == len(sample.lower):
                            sample.lower.append(0.0)
                        sample.lower[level] += _filled(tier.store.pool)
            sample.device /= ranks
            sample.filled /= ranks
            for level, share in enumerate(sample.lower):
                sample.lower[level] = share / ranks
        self.times.append(now)
        self._last = row
        self.points.append(row)
        if len(self.times) >= 2 * self.wanted:
            self.times = self.times[::2]
            self.points = self.points[::2]
            self.distance *= 2
        return now - now % self.distance + self.distance

    def clear(self, now: int) -> None:
        """Discard the points so far, and count from ``now`` on."""
        self.times, self.points = [], []
        self.held = self.cached = 0.0
        self._since = now

    def as_dict(self, workers: Sequence[int], step: int = 1) -> dict[str, object]:
        """Return columns: ``times_s``, every ``step``th of them, and per quantity a list of values for each of ``workers``,
        which are numbers.
        """
        columns: dict[str, object] = {"times_s": [instant / 1e9 for instant in self.times[::step]]}
        rows = self.points[::step]
        series = [[row[worker] for row in rows] for worker in workers]
        columns["running"] = [[sample.running for sample in worker] for worker in series]
        columns["waiting"] = [[sample.waiting for sample in worker] for worker in series]
        columns["loading"] = [[sample.loading for sample in worker] for worker in series]
        # Rounded here and not when they are taken: that takes longer than a sample, and half of them are dropped.
        columns["device"] = [[round(sample.device, 6) for sample in worker] for worker in series]
        columns["filled"] = [[round(sample.filled, 6) for sample in worker] for worker in series]
        lower = [[[round(share, 6) for share in sample.lower] for sample in worker] for worker in series]
        depth = max((len(shares) for worker in lower for shares in worker), default=0)
        for level, tier in enumerate(LOWER_TIERS[: max(2, depth)]):  # host and storage always
            columns[tier.label] = [
                [shares[level] if level < len(shares) else 0.0 for shares in worker] for worker in lower
            ]
        return columns


_NOTHING: Final = Sample()


def _filled(pool: Pool) -> float:
    return 1.0 - pool.unnamed / max(1, pool.num_blocks - 1)
