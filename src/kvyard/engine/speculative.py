"""Decoding with drafts: a job computes its last token and a few guesses in one pass, and keeps those that hold.

How many hold differs from job to job, so these don't take part in the lockstep of ``DecodeBatch``; every pass is worked out.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvyard.blocks import BlockManager
from kvyard.engine.job import Job, JobState


class Drafts:
    """Draws how many drafts hold: one counts only if all before it did. Seeded per request, so that the order in which
    requests are scheduled changes nothing.
    """

    def __init__(self, rates: Sequence[float], seed: int) -> None:
        """``rates``: of each draft of a step, how likely it holds given that those before it do."""
        self.length = len(rates)
        self._rates = rates
        self._seed = seed
        self._draws: dict[str, Random] = {}

    def accepted(self, request_id: str, limit: int) -> int:
        """How many of ``limit`` drafts the next step of this request gets accepted."""
        draw = self._draws.get(request_id)
        if draw is None:
            draw = self._draws[request_id] = Random(f"{self._seed}:{request_id}")
        count = 0
        for rate in self._rates[:limit]:
            if draw.random() >= rate:
                break
            count += 1
        return count

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._draws.pop(request_id, None)


class SpeculativeBatch:
    """The jobs that decode with drafts."""

    def __init__(self, manager: BlockManager, drafts: Drafts) -> None:
        self.jobs: dict[int, Job] = {}
        """By serial."""
        self._manager = manager
        self._drafts = drafts

    def join(self, job: Job) -> None:
        """``job`` has its first token and decodes from now on."""
        job.state = JobState.DECODE
        self.jobs[job.serial] = job

    def leave(self, job: Job) -> None:
        """``job`` stops decoding."""
        del self.jobs[job.serial]

    def forget(self, job: Job) -> None:
        """``job`` has ended, wherever it was."""
        self._drafts.forget(job.id)

    def tokens(self, job: Job) -> int:
        """How many tokens ``job`` computes in a pass: its last one and as many drafts as it can use."""
        return 1 + max(0, min(self._drafts.length, job.max_tokens - job.output - 1))

    def verify(self, job: Job, tokens: int) -> int:
        """``job`` computed its last token and ``tokens - 1`` drafts: take those back that don't hold. Returns how many tokens
        it has produced.
        """
        accepted = self._drafts.accepted(job.id, tokens - 1)
        job.num_computed_tokens += tokens
        job.emit(accepted + 1)
        if tokens - 1 > accepted:
            self._manager.rollback(job, tokens - 1 - accepted)
        return accepted + 1
