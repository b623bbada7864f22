"""Loads: jobs that depend on transfers. Which ones wait for blocks on the way, and when they come back.

What is copied, where to and how long it takes is the offload engine's (``kvyard.tiers``); queues and passes are the
scheduler's.
"""

from collections.abc import Iterable
from typing import Final

from kvyard.blocks import Hit
from kvyard.engine.decode_batch import DecodeBatch
from kvyard.engine.job import Job, JobState
from kvyard.tiers.offload import Offload
from kvyard.tiers.state import LoadStep

NO_HELP: Final = -1
"""Lower tiers have nothing that a job could use."""
NO_ROOM: Final = -2
"""They have, and the device has no room for it yet."""


class Loads:
    """Jobs of one engine that wait for transfers."""

    def __init__(self, offload: Offload, batch: DecodeBatch, *, whole: bool) -> None:
        """``whole``: a load starts only if the whole known sequence of its job fits."""
        self.offload = offload
        self.parked: dict[str, Job] = {}
        """Jobs in no queue, because their blocks are on the way."""
        self.stalled: dict[int, Job] = {}
        """Decoding jobs that sit out until the block they need has been copied, by serial."""
        self.cleans = offload.config.policy == "on_eviction"
        """Whether blocks must be copied before they are taken."""
        self.stores_output = offload.config.policy == "write_through_generated"
        self._batch = batch
        self._whole = whole
        self._deferred: list[Job] = []
        """Those of the parked that wait for another job's transfer, and ask again after each landing."""
        self._landings = 0
        self._known = 0
        """How often shared tiers had been disturbed when the last pass was formed."""
        self._line: tuple[int, ...] = ()
        self._barred: set[str] = set()
        """Jobs that must compute what they could load: with it they would never get in."""

    # -- prompts ----------------------------------------------------------------------------------------------------

    def ask(self, job: Job, hit: Hit, now: int, others_run: bool) -> int:
        """See whether lower tiers have more of a prompt. If so, ``job`` is parked until it is here, and the answer is how many
        tokens it waits for. Otherwise ``NO_HELP``, or ``NO_ROOM``: then it must wait where it is.
        """
        offload = self.offload
        if job.id in self._barred:
            return NO_HELP
        outcome = offload.onboard(job, hit, now, must_fit=self._whole, has_running=others_run)
        step = outcome.step
        if step is LoadStep.NOTHING:
            return NO_HELP
        if step is LoadStep.NO_ROOM:
            # With nothing under way that makes room later, computing it is the only way left.
            return NO_ROOM if others_run or offload.earliest_deadline() is not None else NO_HELP
        job.state = JobState.LOADING
        self.parked[job.id] = job
        if step is LoadStep.STARTED:
            job.loaded, job.loaded_by_tier = outcome.tokens, outcome.by_tier
        else:
            self._deferred.append(job)
        return outcome.tokens

    def land(self, now: int) -> list[Job]:
        """Transfers that ended by ``now`` take effect. Returns the jobs that wait in the queue again, each to be put before the
        one returned before it: those that waited for another's blocks, then those whose blocks have come.
        """
        offload = self.offload
        self._line = offload.line
        loaded = offload.tick(now)
        back: list[Job] = []
        landings = offload.state.landings
        if landings != self._landings:
            self._landings = landings
            deferred, self._deferred = self._deferred, []
            for job in reversed(deferred):
                if job.state is JobState.LOADING:
                    back.append(job)
            for job in self.stalled.values():
                self._batch.join(job)
            self.stalled.clear()
        for request in reversed(loaded):
            assert isinstance(request, Job)
            back.append(request)
        for job in back:
            del self.parked[job.id]
            job.state = JobState.WAITING
        return back

    def give_back(self, job: Job, now: int, bar: bool) -> None:
        """A waiting ``job`` gives back what was loaded for it; ``bar``: it must compute it from now on."""
        self.offload.forget(job, now)
        job.loaded, job.loaded_by_tier = 0, ()
        if bar:
            self._barred.add(job.id)

    def forget(self, job: Job, now: int) -> None:
        """``job`` has ended or is preempted; before its blocks are freed."""
        self.offload.forget(job, now)
        self._barred.discard(job.id)

    # -- blocks that must be copied before they are taken -----------------------------------------------------------

    def must_wait(self, job: Job, tokens: int, now: int, hit: Hit | None = None) -> bool:
        """Whether the blocks that ``job`` would get for ``tokens`` more tokens, after ``hit``, are still being copied out."""
        blocks = self.offload.layout.demand(job, hit, tokens)
        return blocks > 0 and self.offload.make_clean(blocks, now, hit) is not None

    def stall(self, job: Job) -> None:
        """``job`` leaves the decode batch until a copy has landed."""
        self._batch.leave(job)
        self.stalled[job.serial] = job

    @property
    def cleaning(self) -> bool:
        """Whether blocks were sent to be copied or were taken since ``land``: the next pass may find others to send. Under
        ``on_eviction`` only.
        """
        return self.offload.line != self._line

    # -- output -----------------------------------------------------------------------------------------------------

    def store_output(self, decoding: Iterable[Job], end: int) -> None:
        """Complete blocks that ``decoding`` jobs generated may be stored too."""
        offload, tick = self.offload, self._batch.tick
        for job in decoding:
            job.catch_up(tick)
            if job.num_computed_tokens >= offload.quiet_until(job):
                offload.offload(job, end)

    def quiet_passes(self, decoding: Iterable[Job]) -> int:
        """How many passes until one of the ``decoding`` jobs may have something to store; at least one."""
        offload, tick = self.offload, self._batch.tick
        left = min(offload.quiet_until(job) - (job.base + tick - job.joined) for job in decoding)
        return max(1, min(left, 1 << 30))

    # -- shared tiers -----------------------------------------------------------------------------------------------

    def formed(self) -> None:
        """A pass was formed, with all that is known now."""
        self._known = self.offload.disturbances

    def disturbed(self, waiting: bool) -> bool:
        """Whether what a shared tier has to offer has changed since, and a job here may be about to ask for it: one that is
        ``waiting``, or one that is parked.
        """
        if self.offload.disturbances == self._known:
            return False
        return self.cleans or bool(self._deferred) or waiting
