"""Blocks for jobs that decode: the one way in which they get them, for the pass being formed and for the passes of a plan.

Mostly a job asks its block manager in the pass in which it needs a block (``take``). In a plan nothing else happens to the
pool, so the blocks of all passes that are carried out together can also be taken in one go (``ahead``): the same blocks go to
the same jobs, since they are dealt out in the order of passes and, in a pass, of admission. A job's table gets them later
(``settle``), when it is looked at.

With ``ahead`` the events of several passes come out together. So it is for replays in which nothing reads them in between, and
for one group of full attention where the generated blocks of each job have names of their own.
"""

from collections.abc import Iterable

from kvyard.blocks import BlockManager
from kvyard.engine.decode_batch import DecodeBatch
from kvyard.engine.job import Job, JobState
from kvyard.hashing import TraceChain


class DecodeBlocks:
    """Takes blocks for the jobs of a decode batch."""

    def __init__(self, manager: BlockManager, batch: DecodeBatch, *, ahead: bool = False, defers: bool = False) -> None:
        """``defers``: blocks that only their own job can name may be registered when the next one is taken."""
        self.ahead = ahead
        self._manager = manager
        self._batch = batch
        self._defers = defers
        self._inserts = manager.tree is not None
        self.headroom = False
        """True if a decode pass evicts until there is a block for every job in it, needed or not, as SGLang does."""
        self._roomy = -1
        """The last pass that this was done for."""
        self._size = manager.groups[0].block_size

    @staticmethod
    def can_take_ahead(manager: BlockManager) -> bool:
        """Return true if blocks of many passes may be taken in one go."""
        groups = manager.groups
        return (
            len(groups) == 1
            and groups[0].spec.is_full
            and manager.caching
            and not groups[0].acts_every_step
            and not manager.keeps_by_priority  # a priority may expire between two passes
            and not (manager.reads_time or manager.reads_queue)
        )

    @property
    def together(self) -> bool:
        """Return true if the passes of a plan get their blocks in one go now."""
        return self.ahead and not self._batch.exact

    def evict_none(self, passes: int) -> bool:
        """Return true if ``passes`` passes can't need more blocks than there are without a name."""
        blocks = passes // self._size + 1 + self.headroom
        return self._batch.count * blocks <= self._manager.pool.unnamed

    # -- jobs that come and go --------------------------------------------------------------------------------------

    def arrive(self, job: Job) -> None:
        """Note whether what ``job`` completes while decoding may be registered late."""
        job.defers = self._inserts or (self._defers and isinstance(job.chain, TraceChain))

    def join(self, job: Job) -> None:
        """``job`` has its first token and decodes from the next pass on."""
        if self.ahead:
            self._manager.note_limits(job)
        self._batch.join(job)

    def settle(self, jobs: Iterable[Job]) -> None:
        """Put what was taken ahead for ``jobs`` into their tables."""
        for job in jobs:
            if job.ahead:
                self._manager.hand_over(job, job.ahead)
                job.ahead = []

    def close(self, job: Job) -> None:
        """``job`` is about to give its blocks back: first register those of them that were put off."""
        self.settle((job,))
        if self._inserts:
            return  # nothing gets a name but by an insert
        if job.defers and job.state is JobState.DECODE and job.num_computed_tokens > job.registered_until:
            self._manager.cache(job, min(job.num_computed_tokens, job.num_tokens - 1))

    # -- the pass being formed --------------------------------------------------------------------------------------

    def begin_pass(self, *, in_order: bool, alone: bool) -> list[Job]:
        """Return the jobs that must ``take`` a block each for the pass being formed. None, if all can have theirs at once.

        For that no job may fail, and decoding jobs must come before all others that take blocks (``in_order``). With
        nothing else to take any (``alone``) it waits until the plan is carried out.
        """
        batch = self._batch
        if in_order and self.together and batch.count <= self._manager.pool.free:
            if not alone:
                self._take_before(batch.tick + 1)
            return []
        return self.due()

    def due(self) -> list[Job]:
        """Return the jobs that need a block in the pass being formed, in order of admission, their tables complete."""
        jobs = self._batch.due()
        if self.ahead:
            self.settle(jobs)
        return jobs

    def take(self, job: Job) -> bool:
        """Give ``job``, which was due, the blocks of its next token; false if there are none."""
        if self._manager.allocate(job, 1) is None:
            return False
        self._batch.watch(job, self._batch.tick + 1)
        return True

    # -- the passes of a plan ---------------------------------------------------------------------------------------

    def carry_out(self, tick: int, until: int) -> int:
        """Pass ``tick`` of a plan has begun, and those before ``until`` are certain: take the blocks of it, or of all of them
        (``together``). Returns the next pass that needs any, or ``until``.
        """
        batch = self._batch
        if self.together:
            if self.headroom and until - 1 > self._roomy:
                # What the last of these passes evicts for includes what those before it do.
                self._take_before(until - 1)
                self._manager.pool.radix.make_room(batch.count)
                self._roomy = until - 1
            self._take_before(until)
            return until
        batch.advance(tick - batch.tick)
        if self.headroom and tick > self._roomy:
            self.make_headroom()
        for job in batch.due():
            if not self.take(job):
                raise AssertionError(f"{job} was promised a block and there is none")
        following = batch.next_touch()
        if self.headroom and self._manager.pool.unnamed < batch.count:
            following = tick + 1
        if following is None or following >= until:
            return until
        return following if following > tick else tick + 1

    def make_headroom(self) -> None:
        """Evict until there is a block for every job in the pass ``tick`` (``headroom``)."""
        self._manager.pool.radix.make_room(self._batch.count)
        self._roomy = self._batch.tick

    def _take_before(self, tick: int) -> None:
        """Take what jobs need in passes before ``tick``. There must be enough."""
        jobs = self._batch.due_before(tick, self._size)
        pool = self._manager.pool
        if pool.ledger is not None:
            for job in jobs:
                job.ahead += pool.take(1, job.tables[0].account)
        elif jobs:
            for job, block in zip(jobs, pool.take(len(jobs))):
                job.ahead.append(block)
