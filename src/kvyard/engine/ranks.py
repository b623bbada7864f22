"""Ranks: several cores in step. Data-parallel ranks have their own requests and blocks, and start every pass together.

A pass of the engine takes as long as its slowest rank; a rank with nothing to do waits with the others. Driven like one core.
"""

from collections.abc import Sequence

import numpy as np

from kvyard.engine.core import EngineCore
from kvyard.engine.job import Job
from kvyard.errors import KvyardError


class Ranks:
    """The ranks of one engine. Jobs are submitted to a rank by its number."""

    def __init__(self, cores: Sequence[EngineCore]) -> None:
        """Raises ``KvyardError`` for an engine without ranks."""
        if not cores:
            raise KvyardError("an engine needs at least one rank")
        if len(cores) > 1 and any(core.ahead for core in cores):
            raise KvyardError("async_scheduling is modelled for engines of one rank: turn it off for several")
        self.cores = list(cores)

    @property
    def busy(self) -> bool:
        """Whether a pass is under way."""
        return any(core.busy for core in self.cores)

    def submit(self, job: Job, now: int, rank: int = 0) -> None:
        """A request arrives at ``now``; every rank's plan ends with the pass under way, so that it can be in the next."""
        for core in self.cores:
            core.cut(now)
        self.cores[rank].submit(job, now)

    def cancel(self, job: Job, now: int, rank: int = 0) -> None:
        """A request is given up at ``now``."""
        for core in self.cores:
            core.cut(now)
        self.cores[rank].cancel(job, now)

    def next_decision(self) -> int | None:
        """When the ranks next have something to decide."""
        running = [core.next_decision() for core in self.cores if core.busy]
        due = running or [core.next_decision() for core in self.cores]
        return min((when for when in due if when is not None), default=None)

    def advance(self, now: int) -> None:
        """Carry out every pass that has ended by ``now``."""
        for core in self.cores:
            core.advance(now)

    def begin(self, now: int) -> bool:
        """Start a pass on every rank that has something to run, unless one is under way; returns whether one is, then."""
        if len(self.cores) == 1:
            return self.cores[0].begin(now)
        if self.busy:
            return True
        proposed = [(core, durations) for core in self.cores if (durations := core.propose(now)) is not None]
        if not proposed:
            return False
        passes = min(len(durations) for _, durations in proposed)
        running = [core for core, _ in proposed]
        if any(core.restless for core in self.cores if core not in running):
            passes = 1
        slowest = np.maximum.reduce([durations[:passes] for _, durations in proposed])
        landing = min((when for core in self.cores if (when := core.next_landing()) is not None), default=None)
        if landing is not None:
            # A rank that only waits for blocks must not have to wait for the others' plan to end.
            slowest = slowest[: int(slowest.cumsum().searchsorted(landing - now)) + 1]
        for core, _ in proposed:
            core.adopt(slowest, now)
        return True

    def trim(self, now: int, begun: bool = False) -> None:
        """A shared tier was used; see ``EngineCore.trim``. What is uncertain for one rank ends the plans of all."""
        times = [when for core in self.cores if (when := core.uncertain_from(now)) is not None]
        for core in self.cores:
            core.plan_until(min(times, default=None), now, begun)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless every rank agrees with itself and they are in step."""
        for core in self.cores:
            core.check_integrity()
        ends = {core.next_decision() for core in self.cores if core.busy}
        assert len(ends) <= 1, f"ranks are out of step: {sorted(map(str, ends))}"
