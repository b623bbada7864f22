"""The horizon: for how many passes a decode batch stays exactly as it is. This is what makes plans possible.

Nothing that could change the batch may fall into them: a last token, a shortage of blocks, or anything that would let a
waiting job in. The answer may be too small, never too large; tests compare plans with single steps.
"""

from collections.abc import Mapping

from kvyard.blocks import BlockManager
from kvyard.engine.decode_batch import DecodeBatch
from kvyard.engine.decode_blocks import DecodeBlocks
from kvyard.engine.handovers import EngineHandovers
from kvyard.engine.job import Job, JobState
from kvyard.engine.queue import Queue
from kvyard.engine.stores import Stores
from kvyard.hashing import TraceChain


class Horizon:
    """Looks ahead over the jobs of one engine; changes nothing."""

    def __init__(
        self,
        manager: BlockManager,
        batch: DecodeBatch,
        blocks: DecodeBlocks,
        waiting: Queue,
        running: Mapping[int, Job],
        *,
        stores: Stores | None,
        handovers: EngineHandovers | None,
        may_load: bool,
    ) -> None:
        """``may_load``: waiting jobs may load what they lack."""
        self._manager = manager
        self._batch = batch
        self._blocks = blocks
        self._stores = stores
        self._handovers = handovers
        self._may_load = may_load
        self._waiting = waiting
        self._running = running
        self._stepwise = any(group.acts_every_step for group in manager.groups)
        self._reads_queue = manager.reads_queue
        self._reads_time = manager.reads_time
        self._unit = min(group.block_size for group in manager.groups)
        self._never_forgets = all(not group.forgets for group in manager.groups)

    def passes(self, most: int, took_blocks: bool) -> int:
        """Return the number of passes from now on that are equal decode steps, up to ``most``; at least one.

        For a pass that has just been formed, has neither chunks nor drafts and preempted no job; ``took_blocks`` means that
        decoding jobs asked for blocks in it.
        """
        if most == 1 or self._stepwise or (self._reads_queue and self._waiting):
            return 1
        handovers = self._handovers
        if handovers is not None and handovers.deferred:
            return 1
        batch, stores, pool = self._batch, self._stores, self._manager.pool
        cleans = stores is not None and stores.cleans
        if cleans and stores is not None and (took_blocks or stores.stalled or stores.cleaning or self._reads_time):
            return 1  # with an order that time changes, each pass may have other blocks to copy ahead
        end = batch.next_end()
        assert end is not None
        passes = min(most, end - batch.tick)
        # A block taken may be of the head's own prefix, and that it then asks lower tiers for.
        if passes > 1 and (cleans or (self._waiting and (self._may_load or not self._only_shrinks()))):
            touch = batch.next_touch()
            if touch is not None:
                # A pass that sees to blocks may free or register some, and that may let a job in: it must be formed.
                passes = min(passes, max(1, touch - batch.tick))
        if passes > 1 and stores is not None and stores.stores_output:
            passes = min(passes, stores.quiet_passes(in_lockstep(self._running)))
        if passes > 1:
            room = pool.free // (batch.count * len(self._manager.groups))
            if passes // self._unit + 1 > room:
                passes = max(1, (room - 1) * self._unit)
        return passes

    def _only_shrinks(self) -> bool:
        """Return true if decode steps can't help a job that couldn't be admitted: no window frees blocks, and registered
        blocks have hashes that no other job can have.
        """
        if self._blocks.together:
            return True
        if not self._never_forgets:
            return False
        for job in self._running.values():  # a plain loop: it is run often
            if not isinstance(job.chain, TraceChain):
                return False
        return True


def in_lockstep(running: Mapping[int, Job]) -> list[Job]:
    """Return the jobs that take part in every decode pass, in order of admission."""
    return [job for job in running.values() if job.end >= 0 and job.state is JobState.DECODE]
