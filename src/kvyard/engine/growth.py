"""Growth: blocks for decoding jobs, those of many passes at once.

In a plan every decoding job takes a block now and then, and nothing else happens to the pool. So the blocks of all passes that
are carried out together can be taken in one go: the same blocks go to the same jobs, since they are dealt out in the order of
passes and, in a pass, of admission. A job's table gets them when somebody looks at it.

What this gives up is telling events apart by pass: they come out together. It is for replays where nobody could have looked in
between, and for one group of full attention whose generated blocks have names of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvyard.blocks import BlockManager
from kvyard.engine.cohort import Cohort
from kvyard.engine.job import Job

if TYPE_CHECKING:
    from kvyard.engine.scheduler import Scheduler


class Growth:
    """Takes blocks ahead for the jobs of a cohort."""

    def __init__(self, manager: BlockManager, cohort: Cohort) -> None:
        self._manager = manager
        self._cohort = cohort
        self._size = manager.groups[0].block_size

    @staticmethod
    def fits(manager: BlockManager) -> bool:
        """Whether this can stand in for one pass after the other."""
        groups = manager.groups
        return (
            len(groups) == 1
            and groups[0].spec.is_full
            and manager.caching
            and not groups[0].restless
            and not manager.keeps_by_priority  # a priority may expire between two passes
        )

    def covers(self, scheduler: Scheduler) -> bool:
        """Whether the decoding jobs can take their blocks of the next pass at once: none of them can fail, and none comes
        after a job whose prompt is being computed.
        """
        cohort, running, prefilling = self._cohort, scheduler.running, scheduler.prefilling
        if cohort.exact or cohort.count > self._manager.pool.free or len(prefilling) > 1:
            return False
        return not prefilling or next(reversed(running)) in prefilling

    def through(self, tick: int) -> None:
        """Take the blocks that jobs need in passes before ``tick``. There must be enough."""
        jobs = self._cohort.grow(tick, self._size)
        if jobs:
            for job, block in zip(jobs, self._manager.pool.take(len(jobs))):
                job.ahead.append(block)

    def settle(self, job: Job) -> None:
        """Put what was taken for ``job`` into its table."""
        if job.ahead:
            self._manager.hand_over(job, job.ahead)
            job.ahead = []

    def settle_all(self, jobs: Iterable[Job]) -> None:
        """The same for all of ``jobs``."""
        for job in jobs:
            self.settle(job)
