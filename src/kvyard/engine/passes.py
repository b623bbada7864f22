"""A pass: what is computed in it, and for how many passes that stays so. It knows nothing of how it was chosen."""

from collections.abc import Sequence
from typing import TypeAlias

from kvyard.engine.job import Job

Chunk: TypeAlias = tuple[Job, int, int]
"""Part of a job's known tokens, computed in one pass: the job, how many are new, how many came before."""


class Pass:
    """Decision of the scheduler, for this pass and the ``stable_for - 1`` passes after it."""

    __slots__ = (
        "begins",
        "chunks",
        "context",
        "decoding",
        "drafted",
        "entering",
        "left_out",
        "longest",
        "stable_for",
        "until",
    )

    def __init__(
        self,
        chunks: Sequence[Chunk],
        decoding: int,
        context: int,
        longest: int = 0,
        drafted: Sequence[tuple[Job, int]] = (),
        stable_for: int = 1,
        left_out: int = 0,
        entering: Sequence[Job] = (),
    ) -> None:
        self.chunks = chunks
        self.decoding = decoding
        """Number of jobs that decode in it."""
        self.context = context
        """The decoding jobs' summed lengths, the tokens being computed included."""
        self.longest = longest
        """The longest of those lengths, where the timing model needs it."""
        self.drafted = drafted
        """Jobs that verify drafts, and the tokens that each computes."""
        self.stable_for = stable_for
        """Number of passes from this one on that are equal decode steps, without outside input; 1 with chunks or drafts."""
        self.left_out = left_out
        """Number of decoding jobs without a token in it."""
        self.entering = entering
        """Decoding jobs that get their first token of it: another worker computed their prompts."""
        self.begins = 0
        """Earliest start: its evictions have been copied then."""
        self.until = 0
        """Earliest end: its loads have landed then."""


class InFlightPass:
    """A pass that is decided on, whose tokens are not known yet: with asynchronous scheduling."""

    __slots__ = ("decided", "decoding", "ending", "first", "gone", "owed")

    def __init__(self, decided: Pass, first: list[Job], ending: list[Job], decoding: Sequence[Job]) -> None:
        self.decided = decided
        self.first = first
        """Jobs whose known tokens end with it, or that enter with it: they have a token of it."""
        self.ending = ending
        """Jobs that have their last token of it, in order of admission."""
        self.decoding = decoding
        """Jobs that decode in it, if anyone wants to know."""
        self.owed: list[Job] = []
        """Jobs that stopped decoding since it was decided on: they have a token of it too."""
        self.gone: list[Job] = []
        """Jobs that went back to the queue since then, and have no token of it."""

    def forget(self, job: Job) -> None:
        """Take ``job``, which goes back to the queue, out of the pass."""
        self.gone.append(job)
        for jobs in (self.first, self.ending):
            if job in jobs:
                jobs.remove(job)
