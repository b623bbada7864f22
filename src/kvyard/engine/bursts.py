"""Bursts: decoding with drafts. A job computes its last token and a few guesses in one pass, and keeps those that hold.

How many hold differs from job to job, so these don't take part in the lockstep of ``Cohort``; every pass is worked out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvyard.engine.drafts import Drafts
from kvyard.engine.job import Job, State

if TYPE_CHECKING:
    from kvyard.engine.scheduler import Scheduler


class Bursts:
    """The jobs that decode with drafts."""

    def __init__(self, scheduler: Scheduler, drafts: Drafts) -> None:
        self._scheduler = scheduler
        self.drafts = drafts
        self.jobs: dict[int, Job] = {}
        """By serial."""

    def join(self, job: Job) -> None:
        """``job`` has its first token and decodes from now on."""
        job.state = State.DECODE
        self.jobs[job.serial] = job

    def tokens(self, job: Job) -> int:
        """How many tokens ``job`` computes in a pass: its last one and as many drafts as it can use."""
        return 1 + max(0, min(self.drafts.length, job.max_tokens - job.output - 1))

    def verify(self, job: Job, tokens: int, end: int) -> bool:
        """``job`` computed its last token and ``tokens - 1`` drafts; see how many of them hold. True if it is through."""
        scheduler = self._scheduler
        accepted = self.drafts.accepted(job.id, tokens - 1)
        job.num_computed_tokens += tokens
        job.emit(accepted + 1)
        if tokens - 1 > accepted:
            scheduler.manager.rollback(job, tokens - 1 - accepted)
        if scheduler.loads is not None:
            scheduler.loads.offload.offload(job, end)
        scheduler.watcher.produced(job, accepted + 1, end)
        if job.output < job.max_tokens:
            return False
        del self.jobs[job.serial]
        return True
