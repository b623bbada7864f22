"""Loads: jobs that depend on transfers from lower tiers. Which ones wait for blocks in flight, and when they come back.

What is copied, where to and how long it takes is the offload engine's (``kvyard.tiers``); queues and passes are the
scheduler's.
"""

from kvyard.blocks import Hit
from kvyard.engine.job import Job, JobState
from kvyard.engine.load_source import NO_HELP, NO_ROOM, LoadSource
from kvyard.tiers.hicache import HiCache
from kvyard.tiers.load_policy import LOADS
from kvyard.tiers.offload import Offload
from kvyard.tiers.prefetches import Prefetches
from kvyard.tiers.state import LoadStep


class Loads(LoadSource):
    """Jobs of one engine that wait for transfers."""

    def __init__(self, offload: Offload, *, whole: bool) -> None:
        """``whole``: a load starts only if the whole known sequence of its job fits."""
        super().__init__()
        self.offload = offload
        self.weighs = LOADS.get(offload.config.load_policy).needs_times
        self.deferred: list[Job] = []
        """Jobs that wait for another job's transfer, and ask again after each landing."""
        self._whole = whole
        self._landings = 0
        self._barred: set[str] = set()
        """Jobs that must compute what they could load: with it they would never get in."""

    def ask(self, job: Job, hit: Hit, now: int, others_run: bool, backlog: int) -> int:
        offload = self.offload
        if job.id in self._barred:
            return NO_HELP
        outcome = offload.onboard(job, hit, now, must_fit=self._whole, has_running=others_run, backlog=backlog)
        step = outcome.step
        if step is LoadStep.NOTHING:
            return NO_HELP
        if step is LoadStep.NO_ROOM:
            # With nothing in flight that makes room later, computing it is the only way left.
            return NO_ROOM if others_run or offload.earliest_deadline() is not None else NO_HELP
        job.state = JobState.LOADING
        if step is LoadStep.STARTED:
            job.loaded, job.loaded_by_tier = outcome.tokens, outcome.by_tier
            job.pulled = outcome.pulled
        else:
            self.deferred.append(job)
        return outcome.tokens

    def land(self, now: int) -> list[Job]:
        """Return jobs whose wait is over: first those that waited for another job's load, then those whose
        blocks have arrived.
        """
        loaded = self.offload.tick(now)
        back: list[Job] = []
        landings = self.offload.state.landings
        if landings != self._landings:
            self._landings = landings
            deferred, self.deferred = self.deferred, []
            for job in reversed(deferred):
                if job.state is JobState.LOADING:
                    back.append(job)
        for request in reversed(loaded):
            assert isinstance(request, Job)
            back.append(request)
        for job in back:
            job.state = JobState.WAITING
        return back

    def earliest_deadline(self) -> int | None:
        return self.offload.earliest_deadline()

    def admitted(self, job: Job) -> None:
        job.left = self.offload.admitted(job)

    def preempted(self, job: Job, now: int, bar: bool = False) -> None:
        self.offload.forget(job, now)
        job.loaded, job.loaded_by_tier, job.pulled = 0, (), 0
        if bar:
            self._barred.add(job.id)
        else:
            self._barred.discard(job.id)

    def ended(self, job: Job, now: int) -> bool:
        self.offload.forget(job, now)
        self._barred.discard(job.id)
        if self.offload.manager.hints and job.tables:
            self.offload.claim(job, now)
        return False


class TreeLoads(LoadSource):
    """Copies of HiCache. Jobs wait for storage alone, and in their place in the queue."""

    def __init__(self, hicache: HiCache) -> None:
        super().__init__()
        self.hicache = hicache

    def ask(self, job: Job, hit: Hit, now: int, others_run: bool, backlog: int) -> int:
        return NO_HELP

    def land(self, now: int) -> list[Job]:
        self.hicache.tick(now)
        return []

    def earliest_deadline(self) -> int | None:
        return self.hicache.earliest_deadline()

    def arrived(self, job: Job) -> None:
        if self.hicache.prefetches is not None:
            self.hicache.prefetches.arrived(job)

    def ended(self, job: Job, now: int) -> bool:
        if self.hicache.prefetches is not None:
            self.hicache.prefetches.ended(job)
        return False


def prefetches_of(loads: LoadSource | None) -> Prefetches | None:
    """Return prefetches of waiting jobs from storage, if there are any."""
    return loads.hicache.prefetches if isinstance(loads, TreeLoads) else None
