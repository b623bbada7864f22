"""Loads: jobs that depend on transfers from lower tiers. Which ones wait for blocks on the way, and when they come back.

What is copied, where to and how long it takes is the offload engine's (``kvyard.tiers``); queues and passes are the
scheduler's.
"""

from collections.abc import Iterable

from kvyard.blocks import Hit
from kvyard.engine.decode_batch import DecodeBatch
from kvyard.engine.job import Job, JobState
from kvyard.engine.load_source import NO_HELP, NO_ROOM, LoadSource
from kvyard.tiers.load_policy import LOADS
from kvyard.tiers.offload import Offload
from kvyard.tiers.state import LoadStep


class Loads(LoadSource):
    """Jobs of one engine that wait for transfers."""

    def __init__(self, offload: Offload, batch: DecodeBatch, *, whole: bool) -> None:
        """``whole``: a load starts only if the whole known sequence of its job fits."""
        super().__init__()
        self.offload = offload
        self.cleans = offload.config.policy == "on_eviction"
        self.stores_output = offload.config.policy == "write_through_generated"
        self.weighs = LOADS.get(offload.config.load_policy).needs_times
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
        offload = self.offload
        if job.id in self._barred:
            return NO_HELP
        outcome = offload.onboard(job, hit, now, must_fit=self._whole, has_running=others_run, backlog=self.backlog)
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
            job.pulled = outcome.pulled
        else:
            self._deferred.append(job)
        return outcome.tokens

    def land(self, now: int) -> list[Job]:
        """First those that waited for another's blocks, then those whose blocks have come."""
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

    def earliest_deadline(self) -> int | None:
        return self.offload.earliest_deadline()

    def admitted(self, job: Job) -> None:
        job.left = self.offload.admitted(job)

    def can_give_back(self) -> bool:
        return self.offload.earliest_deadline() is None

    def give_back(self, job: Job, now: int, bar: bool) -> None:
        self.offload.forget(job, now)
        job.loaded, job.loaded_by_tier, job.pulled = 0, (), 0
        if bar:
            self._barred.add(job.id)

    def forget(self, job: Job, now: int) -> None:
        self.offload.forget(job, now)
        self._barred.discard(job.id)

    def claim(self, job: Job, now: int) -> None:
        self.offload.claim(job, now)

    # -- blocks that must be copied before they are taken -----------------------------------------------------------

    def must_wait(self, job: Job, tokens: int, now: int, hit: Hit | None = None) -> bool:
        blocks = self.offload.layout.demand(job, hit, tokens)
        return blocks > 0 and self.offload.make_clean(blocks, now, hit) is not None

    def stall(self, job: Job) -> None:
        self._batch.leave(job)
        self.stalled[job.serial] = job

    @property
    def cleaning(self) -> bool:
        """Under ``on_eviction`` only."""
        return self.offload.line != self._line

    # -- stores -----------------------------------------------------------------------------------------------------

    def store(self, job: Job, end: int) -> None:
        self.offload.offload(job, end)

    def store_output(self, decoding: Iterable[Job], end: int) -> None:
        offload, tick = self.offload, self._batch.tick
        for job in decoding:
            job.catch_up(tick)
            if job.num_computed_tokens >= offload.quiet_until(job):
                offload.offload(job, end)

    def quiet_passes(self, decoding: Iterable[Job]) -> int:
        offload, tick = self.offload, self._batch.tick
        left = min(offload.quiet_until(job) - (job.base + tick - job.joined) for job in decoding)
        return max(1, min(left, 1 << 30))

    # -- shared tiers -----------------------------------------------------------------------------------------------

    def formed(self) -> None:
        self._known = self.offload.disturbances

    def disturbed(self, waiting: bool) -> bool:
        if self.offload.disturbances == self._known:
            return False
        return self.cleans or bool(self._deferred) or waiting
