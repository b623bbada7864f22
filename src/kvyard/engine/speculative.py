"""Decoding with drafts: a job computes its last token and a few guesses in one pass, and keeps those that hold.

How many hold differs from job to job, so these don't take part in the lockstep of ``DecodeBatch``; every pass is worked out.
"""

from collections.abc import Callable, Sequence
from random import Random

from kvyard.blocks import BlockManager
from kvyard.engine.job import Job, JobState


class DraftChances:
    """Draws how many drafts hold. Chance is seeded per request, so that the order of scheduling changes nothing."""

    def __init__(self, rates: Sequence[float], seed: int) -> None:
        """``rates``: of each draft of a step, how likely it holds given that those before it do."""
        self._rates = rates
        self._seed = seed
        self._chance: dict[str, Random] = {}

    def holding(self, job: Job, drafts: int) -> int:
        """Return how many of the next ``drafts`` of ``job`` are accepted."""
        chance = self._chance.get(job.id)
        if chance is None:
            chance = self._chance[job.id] = Random(f"{self._seed}:{job.id}")
        held = 0
        for rate in self._rates[:drafts]:
            if chance.random() >= rate:
                break
            held += 1
        return held

    def forget(self, job: Job) -> None:
        """``job`` has ended."""
        self._chance.pop(job.id, None)


class SpeculativeBatch:
    """The jobs that decode with drafts."""

    def __init__(self, manager: BlockManager, rates: Sequence[float], seed: int, *, lookahead: int = 0) -> None:
        """``rates`` and ``seed``: of ``DraftChances``; ``lookahead``: slots that the drafter writes to beyond the tokens of a
        pass.
        """
        self.jobs: dict[int, Job] = {}
        """By serial."""
        self.drafts = len(rates)
        """Per step."""
        self.lookahead = lookahead
        self._manager = manager
        self._chances = DraftChances(rates, seed)
        self.holding: Callable[[Job, int], int] = self._chances.holding
        """Returns how many drafts of a job are accepted. A recorded run puts in its own."""

    def join(self, job: Job) -> None:
        """``job`` has its first token and decodes from now on."""
        job.state = JobState.DECODE
        self.jobs[job.serial] = job

    def forget(self, job: Job) -> None:
        """``job`` has ended, wherever it was."""
        self._chances.forget(job)

    @staticmethod
    def ends(job: Job) -> bool:
        """Return true if ``job`` has its last token."""
        return job.aborted or job.output >= job.max_tokens

    def tokens(self, job: Job) -> int:
        """Return the number of tokens that ``job`` computes in a pass: its last one and the drafts, of which more than it
        may still produce are computed for nothing; none beyond the model's length.
        """
        return min(1 + self.drafts, self._manager.max_model_len - job.num_tokens)

    def filler(self, past: int) -> int:
        """Return the number of made-up drafts that join the one token which a job admitted with ``past`` computed ones has
        to compute, so that all jobs of the pass compute as many. They are never accepted.
        """
        return self.drafts if past + self.drafts + 2 <= self._manager.max_model_len else 0

    def verify(self, job: Job, tokens: int) -> int:
        """``job`` computed its last token and ``tokens - 1`` drafts: take those back that don't hold, or that are more than it
        may produce. Returns how many tokens it has produced.
        """
        produced = min(1 + self.holding(job, tokens - 1), job.remaining)
        job.num_computed_tokens += tokens
        job.emit(produced)
        if tokens > produced:
            self._manager.rollback(job, tokens - produced)
        return produced


class ReservedDrafts(SpeculativeBatch):
    """Jobs that decode with drafts as SGLang's do: slots for the next passes are reserved, and stay a job's whatever is
    accepted.
    """

    def __init__(self, manager: BlockManager, rates: Sequence[float], seed: int, *, width: int, reserve: int) -> None:
        """``width``: tokens that a job verifies in a pass; ``reserve``: slots that it has beyond its computed tokens."""
        super().__init__(manager, rates, seed)
        self.width = width
        self.reserve = reserve
        self.verifying: Callable[[Job, int], None] | None = None
        """Called with a job and how many tokens were accepted, before it has them."""

    def tokens(self, job: Job) -> int:
        return self.width

    def verify(self, job: Job, tokens: int) -> int:
        """``job`` verified ``tokens`` tokens, or computed one together with prompts. One that is aborted has all that were
        accepted. Returns how many it has produced.
        """
        accepted = 1 + self.holding(job, tokens - 1)
        if self.verifying is not None and tokens > 1:
            self.verifying(job, accepted)
        produced = accepted if job.aborted else min(accepted, job.remaining)
        job.emit(produced)
        if tokens > 1 or not self.ends(job):
            job.num_computed_tokens = min(job.num_computed_tokens + accepted, job.num_tokens)
        return produced
