"""TensorRT-LLM's scheduling as Dynamo's mocker simulates it: what is admitted runs to its end. No job is ever preempted.

A request gets in only when its prompt and all the output it may produce have blocks, next to what the running ones have yet
to take. That reserves for the worst case, so fewer run at once than could; in return nothing is ever computed twice. Engines
that hand prompts over to each other go by it too; TensorRT-LLM's own rules are in ``kvyard.engine.policies.trtllm``.
"""

from typing import NoReturn

from kvyard.blocks import Hit
from kvyard.engine.job import Job
from kvyard.engine.lifecycle import Lifecycle
from kvyard.engine.policies.mixed import AdmissionRule
from kvyard.integers import ceil_div


class FitsToTheEnd(AdmissionRule):
    """``guaranteed_no_evict``: a job gets in when it can run to its end without any blocks but those that are free."""

    def __init__(self, jobs: Lifecycle) -> None:
        self._jobs = jobs
        self._size = jobs.manager.groups[0].block_size
        self._left = 0
        """Free blocks that are promised to no job. A block that a running job takes leaves both the free and the promised ones,
        so this only changes when a job comes or ends."""
        self._endings = -1
        """Number of jobs that had ended when that was counted."""

    def enter(self, job: Job, new: int, hit: Hit | None) -> bool:
        jobs = self._jobs
        need = 0
        if hit is not None or not job.tables:  # otherwise it was promised all when its prompt came from another worker
            need = self._need(job, hit)
            if need > self._left:
                return False
        external = job.loaded if hit is not None else 0
        taken = jobs.manager.allocate(job, new, hit, external=external, must_fit=True, has_running=bool(jobs.running))
        assert taken is not None, f"{job} was promised blocks and there are none"
        self._left -= need
        return True

    def can_reserve(self, job: Job, hit: Hit) -> bool:
        fits = self._need(job, hit) <= self._left
        self._endings = -1  # its result is counted at the next request
        return fits

    def _need(self, job: Job, hit: Hit | None) -> int:
        """Return the free blocks that ``job`` takes until its end; sees that ``_left`` is up to date."""
        jobs = self._jobs
        if self._endings != jobs.endings:
            self._endings = jobs.endings
            self._left = jobs.manager.pool.free - self._promised()
        # Only what another job holds is no longer among the free blocks.
        held = hit.groups[0].blocks - hit.groups[0].free_blocks(0) if hit is not None else 0
        return self._to_the_end(job) - held

    def _to_the_end(self, job: Job) -> int:
        return ceil_div(job.num_prompt_tokens + job.max_tokens, self._size)

    def _promised(self) -> int:
        """Return the blocks that running jobs have yet to take, and those whose prompts come from other workers."""
        jobs = self._jobs
        certain = list(jobs.running.values())
        if jobs.may_load:
            certain += jobs.parked.values()
            certain += [job for job in jobs.waiting if job.tables]
        return sum([self._to_the_end(job) - job.tables[0].length - len(job.ahead) for job in certain])

    def check_integrity(self) -> None:
        promised, free = self._promised(), self._jobs.manager.pool.free
        assert promised <= free, f"{promised} blocks are promised and {free} are free"
        if self._endings == self._jobs.endings:
            assert self._left == free - promised, f"{self._left} blocks are left by count, {free - promised} are"


def no_victim(running: dict[int, Job]) -> NoReturn:
    """For a policy that guarantees that no job is preempted."""
    raise AssertionError(f"one of {len(running)} jobs would have to be evicted, which was guaranteed not to happen")
