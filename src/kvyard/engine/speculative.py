"""Decoding with drafts: a job computes its last token and a few guesses in one pass, and keeps those that hold.

How many hold differs from job to job, so these don't take part in the lockstep of ``DecodeBatch``; every pass is worked out.
"""

from collections.abc import Sequence
from random import Random

from kvyard.blocks import BlockManager
from kvyard.engine.job import Job, JobState


class SpeculativeBatch:
    """The jobs that decode with drafts. Chance is seeded per request, so that the order of scheduling changes nothing."""

    def __init__(self, manager: BlockManager, rates: Sequence[float], seed: int) -> None:
        """``rates``: of each draft of a step, how likely it holds given that those before it do."""
        self.jobs: dict[int, Job] = {}
        """By serial."""
        self._manager = manager
        self._rates = rates
        self._seed = seed
        self._chance: dict[str, Random] = {}

    def join(self, job: Job) -> None:
        """``job`` has its first token and decodes from now on."""
        job.state = JobState.DECODE
        self.jobs[job.serial] = job

    def forget(self, job: Job) -> None:
        """``job`` has ended, wherever it was."""
        self._chance.pop(job.id, None)

    def tokens(self, job: Job) -> int:
        """How many tokens ``job`` computes in a pass: its last one and as many drafts as it can use."""
        return 1 + max(0, min(len(self._rates), job.max_tokens - job.output - 1))

    def verify(self, job: Job, tokens: int) -> int:
        """``job`` computed its last token and ``tokens - 1`` drafts: take those back that don't hold. Returns how many tokens
        it has produced.
        """
        chance = self._chance.get(job.id)
        if chance is None:
            chance = self._chance[job.id] = Random(f"{self._seed}:{job.id}")
        accepted = 0
        for rate in self._rates[: tokens - 1]:
            if chance.random() >= rate:
                break
            accepted += 1
        job.num_computed_tokens += tokens
        job.emit(accepted + 1)
        if tokens - 1 > accepted:
            self._manager.rollback(job, tokens - 1 - accepted)
        return accepted + 1
