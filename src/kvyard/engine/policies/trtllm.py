"""TensorRT-LLM's way: what is admitted runs to its end. Nobody is ever pushed out.

A request gets in only when its prompt and all the output it may produce have blocks, next to what the running ones have yet
to take. That reserves for the worst case, so fewer run at once than could; in return nothing is ever computed twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from kvyard.engine.job import Job
from kvyard.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from kvyard.blocks import Hit


class NoEvictScheduler(Scheduler):
    """``guaranteed_no_evict``: passes are formed as vLLM does it, but admission reserves to the end."""

    _left: int | None = None
    """Free blocks that are promised to nobody. A block that a running job takes leaves both the free and the promised ones, so
    this only changes when somebody comes or goes; ``None`` if somebody went.
    """

    def add(self, job: Job, now: int) -> None:
        """``job`` has arrived; it may produce no more than the pool has room for."""
        size = self.manager.groups[0].block_size
        room = self._usable * size - job.num_prompt_tokens
        if room < 1:
            self._reject(
                job,
                now,
                f"its prompt of {job.num_prompt_tokens} tokens leaves no room in the {self._usable} blocks there are",
            )
            return
        job.max_tokens = min(job.max_tokens, room)
        super().add(job, now)

    def _enter(self, job: Job, new: int, hit: Hit | None) -> bool:
        need = self._to_the_end(job)
        if hit is not None:
            # Only what somebody holds is no longer among the free blocks.
            need -= hit.groups[0].blocks - hit.groups[0].free_blocks(0)
        if self._left is None:
            self._left = self.manager.pool.free - self._promised()
        if need > self._left:
            return False
        entered = super()._enter(job, new, hit)
        assert entered, f"{job} was promised blocks and there are none"
        self._left -= need
        return True

    def _release(self, job: Job, now: int) -> None:
        self._left = None
        super()._release(job, now)

    def _to_the_end(self, job: Job) -> int:
        size = self.manager.groups[0].block_size
        return -(-(job.num_prompt_tokens + job.max_tokens) // size)

    def _promised(self) -> int:
        """The blocks that running jobs have yet to take."""
        return sum([self._to_the_end(job) - job.tables[0].length - len(job.ahead) for job in self.running.values()])

    def _preempt(self, job: Job, now: int) -> NoReturn:
        raise AssertionError(f"{job} would have to be evicted, which was guaranteed not to happen")

    def check_integrity(self) -> None:
        super().check_integrity()
        promised, free = self._promised(), self.manager.pool.free
        assert promised <= free, f"{promised} blocks are promised and {free} are free"
        assert self._left in (None, free - promised), f"{self._left} blocks are left by count, {free - promised} are"
