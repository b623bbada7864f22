"""Hand-overs, as one engine sees them: prompts computed here for other workers, and prompts that others computed for this one.

A job that computes a prompt for another worker (``Job.handed_over``) ends with its first token, and its blocks stay until
they are released. A job whose prompt was computed elsewhere (``Job.received``) gets blocks for all of it as soon as there is
room, is in no queue while they are filled, and then decodes: its last prompt token is computed again in its first decode
step, as vLLM does it.

How blocks travel is the caller's business. It is told of a reservation, and says when the blocks have come.
"""

from collections.abc import Iterable

from mypy_extensions import mypyc_attr

from kvyard.blocks import BlockManager, Hit
from kvyard.engine.job import Job, JobState
from kvyard.engine.load_source import AT_ONCE, NO_HELP, NO_ROOM, LoadSource
from kvyard.engine.queue import ArrivalQueue, Queue


@mypyc_attr(allow_interpreted_subclasses=True)  # callers aren't compiled
class HandoverPeer:
    """What an engine tells the one that moves blocks between engines. No verb may call back into the engine."""

    def needs_transfer(self, job: Job, missing: int, blocks: int) -> bool:
        """Whether it takes any time to bring the last ``missing`` tokens of a prompt here, which fill so many ``blocks``, all
        groups together. Asked each time that ``job`` could get in.
        """
        raise NotImplementedError

    def reserved(self, job: Job, now: int) -> None:
        """``job`` has its blocks, and waits until what it was asked about last has come."""
        raise NotImplementedError

    def entered(self, job: Job, now: int) -> None:
        """``job`` decodes in the pass that starts at ``now``. If it needed no transfer, this is the first that is heard."""
        raise NotImplementedError


class HandoverLoads(LoadSource):
    """Both ends of hand-overs at one engine, on top of where other jobs load from."""

    def __init__(
        self, manager: BlockManager, peer: HandoverPeer, inner: LoadSource | None, *, whole: bool, in_order: bool
    ) -> None:
        """``whole``: a job gets in only if all its known tokens fit. ``in_order``: jobs that compute their prompts wait in one
        line with those that don't.
        """
        super().__init__()
        self._manager = manager
        self._peer = peer
        self._inner = inner
        self._whole = whole
        self._in_order = in_order
        self._landed: list[Job] = []
        """Jobs whose blocks have come since the last pass was formed."""
        self._released: list[str] = []
        """Jobs that have ended here and whose blocks no transfer reads or fills any more."""
        if inner is not None:
            # An engine has one of each, whoever puts a job there.
            self.parked, self.stalled, self.leaving = inner.parked, inner.stalled, inner.leaving
            self.cleans, self.stores_output, self.weighs = inner.cleans, inner.stores_output, inner.weighs

    # -- for the caller -----------------------------------------------------------------------------------------------

    def landed(self, job: Job) -> None:
        """The blocks reserved for ``job`` are filled, or never will be if it was given up. Takes effect with the next pass."""
        if job.id in self.parked:
            self._landed.append(job)
        else:
            self.release(job.id)

    def release(self, request_id: str) -> None:
        """What was computed here for another worker is there, or isn't wanted any more. Takes effect with the next pass."""
        if request_id in self.leaving:
            self._released.append(request_id)

    # -- prompts ------------------------------------------------------------------------------------------------------

    def queue(self, waiting: Queue) -> Queue:
        if not self._in_order and isinstance(waiting, ArrivalQueue):
            waiting.strict = False
        return waiting if self._inner is None else self._inner.queue(waiting)

    def ask(self, job: Job, hit: Hit, now: int, others_run: bool) -> int:
        if not job.received:
            if self._inner is None:
                return NO_HELP
            self._inner.backlog = self.backlog
            return self._inner.ask(job, hit, now, others_run)
        missing = job.num_tokens - hit.tokens
        if not self._peer.needs_transfer(job, missing, self._blocks_of(job, hit)):
            job.loaded = missing - 1
            return AT_ONCE
        taken = self._manager.allocate(
            job, 0, hit, external=missing, delay_caching=True, must_fit=self._whole, has_running=others_run
        )
        if taken is None:
            return NO_ROOM
        job.num_computed_tokens = job.num_tokens
        job.loaded = missing
        job.state = JobState.LOADING
        self.parked[job.id] = job
        self._peer.reserved(job, now)
        return missing

    def _blocks_of(self, job: Job, hit: Hit) -> int:
        """How many blocks are filled by what ``hit`` lacks: windows and states need less than full attention."""
        count = 0
        for group, found in zip(self._manager.groups, hit.groups):
            size = group.block_size
            read_from = group.rule.stale(job.num_tokens) // size
            count += max(0, -(-job.num_tokens // size) - max(found.blocks, read_from))
        return count

    def land(self, now: int) -> list[Job]:
        self.free_ended(now)
        back = [] if self._inner is None else self._inner.land(now)
        landed, self._landed = self._landed, []
        for job in reversed(landed):
            if self.parked.pop(job.id, None) is None:
                self.release(job.id)  # given up in the meantime
                continue
            job.state = JobState.WAITING
            self._manager.cache(job, job.num_tokens)
            job.num_computed_tokens -= 1
            job.loaded -= 1
            back.append(job)
        self.free_ended(now)
        return back

    def admitted(self, job: Job) -> None:
        if self._inner is not None and not job.received:
            self._inner.admitted(job)

    def receive(self, job: Job) -> None:
        if self._inner is not None and not job.received:
            self._inner.receive(job)

    def entered(self, job: Job, now: int) -> None:
        self._peer.entered(job, now)

    def earliest_deadline(self) -> int | None:
        """Of what isn't handed over: when those blocks come, the caller says."""
        return None if self._inner is None else self._inner.earliest_deadline()

    def parked_in_line(self) -> int:
        return 0 if self._inner is None else self._inner.parked_in_line()

    # -- the ways out -------------------------------------------------------------------------------------------------

    def can_give_back(self) -> bool:
        """While blocks are on their way, something will change."""
        return not self.parked and (self._inner is None or self._inner.can_give_back())

    def give_back(self, job: Job, now: int, bar: bool) -> None:
        if job.received:
            job.received = False
            job.loaded = 0
        elif self._inner is not None:
            self._inner.give_back(job, now, bar)

    def forget(self, job: Job, now: int) -> None:
        if self._inner is not None:
            self._inner.forget(job, now)

    def keeps(self, job: Job, now: int) -> bool:
        """What others still read, and what is still being filled."""
        if (job.handed_over and job.state is JobState.FINISHED) or (job.received and job.state is JobState.LOADING):
            self.leaving[job.id] = job
            return True
        return self._inner is not None and self._inner.keeps(job, now)

    def free_ended(self, now: int) -> None:
        if self._inner is not None:
            self._inner.free_ended(now)
        released, self._released = self._released, []
        for request_id in released:
            job = self.leaving.pop(request_id, None)
            if job is not None:
                self._manager.free(job)

    def drops_with_pass(self, job: Job) -> bool:
        return self._inner is not None and self._inner.drops_with_pass(job)

    # -- what is the other source's alone -----------------------------------------------------------------------------

    def must_wait(self, job: Job, tokens: int, now: int, hit: Hit | None = None) -> bool:
        return self._inner is not None and self._inner.must_wait(job, tokens, now, hit)

    def stall(self, job: Job) -> None:
        assert self._inner is not None
        self._inner.stall(job)

    @property
    def cleaning(self) -> bool:
        return self._inner is not None and self._inner.cleaning

    def store(self, job: Job, end: int) -> None:
        if self._inner is not None:
            self._inner.store(job, end)

    def store_output(self, decoding: Iterable[Job], end: int) -> None:
        if self._inner is not None:
            self._inner.store_output(decoding, end)

    def quiet_passes(self, decoding: Iterable[Job]) -> int:
        assert self._inner is not None
        return self._inner.quiet_passes(decoding)

    def formed(self) -> None:
        if self._inner is not None:
            self._inner.formed()

    def disturbed(self, waiting: bool) -> bool:
        return self._inner is not None and self._inner.disturbed(waiting)
