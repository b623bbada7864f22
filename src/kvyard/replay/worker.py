"""A worker of a simulated fleet: an engine, its life, and what it had to do."""

from __future__ import annotations

from collections import Counter

from kvyard.engine.core import EngineCore
from kvyard.engine.job import Job
from kvyard.engine.ranks import Ranks
from kvyard.engine.role import Role
from kvyard.replay.recorder import Recorder


class Worker:
    """One engine with one or more ranks. The fleet drives it through ``engine`` and finds its ranks by number."""

    def __init__(self, number: int, name: str, block_size: int, role: Role = "both") -> None:
        self.number = number
        self.name = name
        self.block_size = block_size
        """Tokens per block of its requests' chains."""
        self.role = role
        self.cores: list[EngineCore] = []
        self.recorders: list[Recorder] = []
        self.jobs: dict[str, Job] = {}
        """Those that are here and not through."""
        self.alive = True
        self.draining = False
        """It takes no new requests, for ever."""

    def add(self, core: EngineCore, recorder: Recorder) -> None:
        """One more rank, and the recorder that watches it."""
        self.cores.append(core)
        self.recorders.append(recorder)
        self.engine: EngineCore | Ranks = core if len(self.cores) == 1 else Ranks(self.cores)

    def submit(self, job: Job, now: int, rank: int) -> None:
        """Hand ``job`` over to a rank."""
        self.jobs[job.id] = job
        if job.retention and not self.cores[rank].scheduler.manager.keeps_by_priority:
            job.retention = ()  # the trace says what is worth keeping; this engine evicts by other rules
        engine = self.engine
        if isinstance(engine, Ranks):
            engine.submit(job, now, rank)
        else:
            engine.submit(job, now)

    def tier_counters(self) -> dict[str, int]:
        """What its lower tiers did, all ranks together; empty without any."""
        total: Counter[str] = Counter()
        for core in self.cores:
            if core.offload is not None:
                total.update(core.offload.counters.flat())
        return dict(total)
