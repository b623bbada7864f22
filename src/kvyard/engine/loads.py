"""Loads: the scheduler's dealings with lower tiers. Who waits for blocks on the way, and when they come back.

What is copied, where to and how long it takes is the offload engine's (``kvyard.tiers``); here it is about jobs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvyard.engine.job import Job, State
from kvyard.tiers.outcome import Step

if TYPE_CHECKING:
    from kvyard.blocks import Hit
    from kvyard.engine.scheduler import Scheduler
    from kvyard.tiers.offload import Offload


class Loads:
    """Jobs that depend on transfers."""

    def __init__(self, scheduler: Scheduler, offload: Offload) -> None:
        self._scheduler = scheduler
        self.offload = offload
        self.parked: dict[str, Job] = {}
        """Jobs in no queue, because their blocks are on the way."""
        self.stalled: dict[int, Job] = {}
        """Decoding jobs that sit out until the block they need has been copied, by serial."""
        self.cleans = offload.config.policy == "on_eviction"
        """Whether blocks must be copied before they are taken."""
        self.stores_output = offload.config.policy == "write_through_generated"
        self._deferred: list[Job] = []
        """Those of the parked that wait for somebody else's transfer, and ask again after each landing."""
        self._landings = 0
        self._known = 0
        """How often shared tiers had been disturbed when the last pass was formed."""
        self._line: tuple[int, ...] = ()
        self._barred: set[str] = set()
        """Jobs that must compute what they could load: with it they would never get in."""

    def ask(self, job: Job, hit: Hit, now: int) -> bool | None:
        """See whether lower tiers have more of the head's prompt. True: it was taken out of the queue and waits for them.
        False: it must wait at the head. ``None``: they don't help.
        """
        scheduler, offload = self._scheduler, self.offload
        if job.id in self._barred:
            return None
        running = bool(scheduler.running)
        outcome = offload.onboard(
            job, hit, now, must_fit=scheduler.config.scheduler_reserve_full_isl, has_running=running
        )
        step = outcome.step
        if step is Step.NOTHING:
            return None
        if step is Step.NO_ROOM:
            # With nobody around to make room later, computing it is the only way left.
            return False if running or offload.earliest_deadline() is not None else None
        scheduler.waiting.pop()
        job.state = State.LOADING
        self.parked[job.id] = job
        if step is Step.STARTED:
            job.loaded, job.loaded_storage = outcome.tokens, outcome.storage_tokens
        else:
            self._deferred.append(job)
        scheduler.watcher.loading(job, now, outcome.tokens)
        return True

    def land(self, now: int) -> None:
        """Transfers that ended by ``now`` take effect. Jobs whose blocks have come go to the front, first come first;
        those that waited for somebody else's blocks ask again behind them.
        """
        offload = self.offload
        self._line = offload.line
        loaded = offload.tick(now)
        landings = offload.landings
        if landings != self._landings:
            self._landings = landings
            deferred, self._deferred = self._deferred, []
            for job in reversed(deferred):
                if job.state is State.LOADING:
                    self._return(job)
            for job in self.stalled.values():
                self._scheduler.cohort.join(job)
            self.stalled.clear()
        for request in reversed(loaded):
            assert isinstance(request, Job)
            self._return(request)

    @property
    def cleaning(self) -> bool:
        """Whether blocks were sent to be copied or were taken since ``land``: the next pass may find others to send. Under
        ``on_eviction`` only.
        """
        return self.offload.line != self._line

    def untangle(self, now: int) -> bool:
        """Nothing runs and nobody could be let in. If that is because waiting jobs hold loaded blocks, and no transfer will
        ever change it, take the blocks of the last such job; returns whether there was one.
        """
        scheduler = self._scheduler
        if scheduler.running or self.offload.earliest_deadline() is not None:
            return False
        for job in reversed(list(scheduler.waiting)):
            if job.tables:
                self.offload.forget(job, now)
                scheduler.manager.preempt(job)
                scheduler.preemptions += 1
                job.preemptions += 1
                job.loaded = job.loaded_storage = 0
                if not scheduler.manager.requests:
                    self._barred.add(job.id)
                scheduler.watcher.preempted(job, now)
                return True
        return False

    def forget(self, job: Job, now: int) -> None:
        """``job`` has ended or is pushed out; before its blocks are freed."""
        self.offload.forget(job, now)
        self._barred.discard(job.id)

    def _return(self, job: Job) -> None:
        del self.parked[job.id]
        job.state = State.WAITING
        self._scheduler.waiting.push_front(job)

    def must_wait(self, job: Job, tokens: int, now: int, hit: Hit | None = None) -> bool:
        """Whether the blocks that ``job`` would get for ``tokens`` more tokens, after ``hit``, are still being copied out."""
        blocks = self.offload.needed(job, tokens, hit)
        return blocks > 0 and self.offload.make_clean(blocks, now, hit) is not None

    def formed(self) -> None:
        """A pass was formed, with all that is known now."""
        self._known = self.offload.disturbances

    @property
    def disturbed(self) -> bool:
        """Whether what a shared tier has to offer has changed since, and somebody here may be about to ask for it."""
        if self.offload.disturbances == self._known:
            return False
        return self.cleans or bool(self._deferred) or len(self._scheduler.waiting) > 0

    def stall(self, job: Job) -> None:
        """``job`` leaves the lockstep until a copy has landed."""
        self._scheduler.cohort.leave(job)
        self.stalled[job.serial] = job

    def offer_output(self, end: int) -> None:
        """Generated blocks that are complete may be stored too."""
        scheduler, offload = self._scheduler, self.offload
        for job in scheduler.lockstep():
            job.catch_up(scheduler.cohort.tick)
            if job.num_computed_tokens >= offload.quiet_until(job):
                offload.offload(job, end)

    def quiet_passes(self) -> int:
        """How many passes until a decoding job may have something to store; at least one."""
        scheduler, offload = self._scheduler, self.offload
        tick = scheduler.cohort.tick
        left = min(offload.quiet_until(job) - (job.base + tick - job.joined) for job in scheduler.lockstep())
        return max(1, min(left, 1 << 30))
