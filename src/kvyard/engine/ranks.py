"""Ranks: several cores in step. Data-parallel ranks have their own requests and blocks, and start every pass together.

This is how vLLM runs mixtures of experts: ranks exchange tokens in every layer. A pass of the engine takes as long as its
slowest rank, and as the experts take for all ranks' tokens; a rank with nothing to do computes a pass with nothing in it.
With passes decided ahead all ranks decide on the next one when the pass before it starts. Driven like one core.
"""

from collections.abc import Sequence

import numpy as np

from kvyard.engine.core import EngineCore
from kvyard.engine.job import Job
from kvyard.engine.timing import SharedExperts
from kvyard.errors import KvyardError


class Ranks:
    """The ranks of one engine. Jobs are submitted to a rank by its number."""

    def __init__(self, cores: Sequence[EngineCore]) -> None:
        """Raises ``KvyardError`` for an engine without ranks, and for ranks of which only some decide ahead."""
        if not cores:
            raise KvyardError("an engine needs at least one rank")
        self.ahead = cores[0].ahead
        """True if a pass is decided on when the one before it starts."""
        if any(core.ahead != self.ahead for core in cores):
            raise KvyardError("async_scheduling is on or off for all ranks of an engine")
        self.cores = list(cores)
        timing = cores[0].timing
        self._started = -1
        """With passes decided ahead: start of the pass in flight."""
        self._experts = timing if isinstance(timing, SharedExperts) else None

    @property
    def busy(self) -> bool:
        """Return true if a pass is in flight."""
        return any(core.busy for core in self.cores)

    def submit(self, job: Job, now: int, rank: int = 0) -> None:
        """Submit a request at ``now``; every rank's plan ends with the pass in flight, so that it can be in the next."""
        for core in self.cores:
            core.cut(now)
        self.cores[rank].submit(job, now)

    def cancel(self, job: Job, now: int, rank: int = 0) -> None:
        """Cancel a request at ``now``."""
        for core in self.cores:
            core.cut(now)
        self.cores[rank].cancel(job, now)

    def cut(self, now: int) -> None:
        """Discard plans for everything after the passes that are in flight at ``now``."""
        for core in self.cores:
            core.cut(now)

    def next_decision(self) -> int | None:
        """Return the time of the ranks' next decision."""
        running = [core.next_decision() for core in self.cores if core.busy]
        due = running or [core.next_decision() for core in self.cores]
        return min((when for when in due if when is not None), default=None)

    def next_change(self) -> int | None:
        """Return the next time at which caches of any rank may change; see ``EngineCore.next_change``."""
        return min((when for core in self.cores if (when := core.next_change()) is not None), default=None)

    def advance(self, now: int) -> None:
        """Carry out every pass that has ended by ``now``."""
        if not self.ahead or len(self.cores) == 1:
            for core in self.cores:
                core.advance(now)
            return
        if self.busy and (end := self.next_decision()) is not None and end <= now:
            for core in self.cores:
                core.advance(end)
            for core in self.cores:
                if not core.busy:
                    core.decide_ahead(end)  # its pass was a dummy one, with none decided on behind it
            self._start_together(end)

    def begin(self, now: int) -> bool:
        """Start a pass on every rank that has something to run, unless one is in flight; returns true if one is then."""
        if len(self.cores) == 1:
            return self.cores[0].begin(now)
        if self.ahead:
            return self._begin_ahead(now)
        if self.busy:
            return True
        proposed = [(core, durations) for core in self.cores if (durations := core.propose(now)) is not None]
        if not proposed:
            return False
        passes = min(len(durations) for _, durations in proposed)
        running = [core for core, _ in proposed]
        if any(core.scheduler.may_reconsider for core in self.cores if core not in running):
            passes = 1
        tokens = [core.tokens for core in self.cores]
        slowest = np.maximum.reduce(
            [durations[:passes] + self._uneven(core.tokens, tokens) for core, durations in proposed]
        )
        landing = min((when for core in self.cores if (when := core.next_landing()) is not None), default=None)
        if landing is not None:
            # A rank that only waits for blocks must not have to wait for the others' plan to end.
            slowest = slowest[: int(slowest.cumsum().searchsorted(landing - now)) + 1]
        for core, _ in proposed:
            core.adopt(slowest, now)
        return True

    def _begin_ahead(self, now: int) -> bool:
        if not self.busy:
            for core in self.cores:
                core.decide_ahead(now)
            if not self._start_together(now):
                return False
        if self._started == now:
            for core in self.cores:
                core.decide_ahead(now)
        return True

    def _start_together(self, now: int) -> bool:
        """Start what is decided on at ``now``; every rank's pass ends with the slowest. Returns whether there is any."""
        running = [core for core in self.cores if core.start_decided(now)]
        if not running:
            return False
        self._started = now
        tokens = [core.tokens for core in self.cores]
        ends = [core.next_decision() for core in running]
        slowest = max(
            end + self._uneven(core.tokens, tokens) for core, end in zip(running, ends, strict=True) if end is not None
        )
        for core in running:
            core.wait_until(slowest)
        return True

    def _uneven(self, tokens: int, of_all: Sequence[int]) -> int:
        """Return the extra time of a pass of ``tokens`` caused by what the other ranks compute in it."""
        return self._experts.uneven_ns(tokens, of_all) if self._experts is not None else 0

    def uncertain_from(self, now: int) -> int | None:
        """Return the time from which things may differ from the plan of any rank; see ``EngineCore.uncertain_from``."""
        return min((when for core in self.cores if (when := core.uncertain_from(now)) is not None), default=None)

    def trim(self, when: int | None, now: int, begun: bool = False) -> None:
        """Discard the plans of all ranks for everything after ``when``; see ``EngineCore.trim``."""
        for core in self.cores:
            core.trim(when, now, begun)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless every rank agrees with itself and they are in step."""
        for core in self.cores:
            core.check_integrity(alone=False)
        if not all(core.scheduler.jobs.idle for core in self.cores):
            assert self.next_decision() is not None, "requests are unfinished and nothing is due to happen (I8)"
        ends = {core.next_decision() for core in self.cores if core.busy}
        assert len(ends) <= 1, f"ranks are out of step: {sorted(map(str, ends))}"
