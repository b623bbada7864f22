"""Hand-overs, as one engine sees them: prompts computed here for other workers, and prompts that others computed for this
one.

A job that computes a prompt for another worker (``Job.handed_over``) ends with its first token, and its blocks stay until
they are released. A job whose prompt was computed elsewhere (``Job.received``) gets blocks for all of it as soon as there
is room, is in no queue while they are filled, and then decodes: its last prompt token is computed again in its first decode
step, as vLLM does it.

The caller moves the blocks. It receives a reservation, and reports when the blocks have arrived.
"""

from mypy_extensions import mypyc_attr

from kvyard.blocks import BlockManager, Hit
from kvyard.engine.job import Job, JobState
from kvyard.engine.load_source import AT_ONCE, NO_ROOM
from kvyard.integers import ceil_div


@mypyc_attr(allow_interpreted_subclasses=True)  # callers aren't compiled
class HandoverPeer:
    """Receiver of an engine's reports that moves blocks between engines. No verb may call back into the engine."""

    def __init__(self, *, reserves_one: bool = False) -> None:
        self.reserves_one = reserves_one
        """True if a pass makes room for one waiting prompt, and for one more for each whose blocks have come since the pass
        before; else, and in an idle engine, for all that fit."""

    def needs_transfer(self, job: Job, missing: int, blocks: int) -> bool:
        """Return true if bringing the last ``missing`` tokens of a prompt here, which fill ``blocks`` blocks in all groups
        together, takes any time. Called each time that ``job`` could be admitted.
        """
        raise NotImplementedError

    def reserved(self, job: Job, now: int) -> None:
        """Note that ``job`` has its blocks, and waits for the transfer that it requested last."""
        raise NotImplementedError

    def entered(self, job: Job, now: int) -> None:
        """``job`` decodes in the pass that starts at ``now``. If it needed no transfer, this is its first report."""
        raise NotImplementedError


class EngineHandovers:
    """Both ends of hand-overs at one engine."""

    def __init__(self, manager: BlockManager, peer: HandoverPeer, *, whole: bool) -> None:
        """``whole``: a job gets in only if all its known tokens fit."""
        self.leaving: dict[str, Job] = {}
        """Jobs that have ended, whose blocks are still read or filled."""
        self.deferred = False
        """True if a job waits for a later pass although there may be room for it."""
        self._manager = manager
        self._peer = peer
        self._whole = whole
        self._landed: list[Job] = []
        """Jobs whose blocks have come since the last pass was formed."""
        self._released: list[str] = []
        """Jobs that have ended here and whose blocks no transfer reads or fills any more."""
        self._reservations = 0
        """Jobs that the pass being formed may still make room for, if they are limited."""

    # -- for the caller -----------------------------------------------------------------------------------------------

    def landed(self, job: Job) -> None:
        """Note that the blocks reserved for ``job`` are filled, or never will be if it was cancelled. Takes effect with the
        next pass.
        """
        if job.state is JobState.LOADING:
            self._landed.append(job)
        else:
            self.release(job.id)

    def release(self, request_id: str) -> None:
        """Release blocks that were computed here for another worker: they have arrived, or aren't wanted. Takes effect with
        the next pass."""
        if request_id in self.leaving:
            self._released.append(request_id)

    # -- for the lifecycle --------------------------------------------------------------------------------------------

    def ask(self, job: Job, hit: Hit, now: int, others_run: bool) -> int:
        """Reserve blocks for a prompt that another worker computes, as ``LoadSource.ask`` does for one that is loaded."""
        missing = job.num_tokens - hit.tokens
        if not self._peer.needs_transfer(job, missing, self._blocks_of(job, hit)):
            job.loaded = missing - 1
            return AT_ONCE
        if self._peer.reserves_one and others_run and self._reservations <= 0:
            self.deferred = True
            return NO_ROOM
        taken = self._manager.allocate(
            job, 0, hit, external=missing, delay_caching=True, must_fit=self._whole, has_running=others_run
        )
        if taken is None:
            return NO_ROOM
        job.num_computed_tokens = job.num_tokens
        job.loaded = missing
        job.state = JobState.LOADING
        self._reservations -= 1
        self._peer.reserved(job, now)
        return missing

    def _blocks_of(self, job: Job, hit: Hit) -> int:
        """Return the number of blocks that ``hit`` lacks: windows and states need less than full attention."""
        count = 0
        for group, match in zip(self._manager.groups, hit.groups):
            size = group.block_size
            read_from = group.rule.stale(job.num_tokens) // size
            count += max(0, ceil_div(job.num_tokens, size) - max(match.blocks, read_from))
        return count

    def land(self) -> list[Job]:
        """Let what has come take effect. Returns the jobs that wait again, each to be put before the one returned before it."""
        back: list[Job] = []
        landed, self._landed = self._landed, []
        for job in reversed(landed):
            if job.state is not JobState.LOADING:
                self.release(job.id)  # given up in the meantime
                continue
            job.state = JobState.WAITING
            self._manager.cache(job, job.num_tokens)
            job.num_computed_tokens -= 1
            job.loaded -= 1
            back.append(job)
        self._reservations = 1 + len(back)
        self.deferred = False
        self.free_ended()
        return back

    def entered(self, job: Job, now: int) -> None:
        """``job`` decodes in the pass that starts at ``now``."""
        self._peer.entered(job, now)

    def keeps(self, job: Job) -> bool:
        """True if the blocks of a ``job`` that has ended are still read by others, or being filled."""
        if (job.handed_over and job.state is JobState.FINISHED) or (job.received and job.state is JobState.LOADING):
            self.leaving[job.id] = job
            return True
        return False

    def free_ended(self) -> None:
        """Give back blocks of ended jobs that were released."""
        released, self._released = self._released, []
        for request_id in released:
            job = self.leaving.pop(request_id, None)
            if job is not None:
                self._manager.free(job)
