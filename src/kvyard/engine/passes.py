"""A pass: what is computed in it, and for how many passes that stays so. It knows nothing of how it was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from kvyard.engine.job import Job

Chunk: TypeAlias = tuple[Job, int, int]
"""Part of a job's known tokens, computed in one pass: the job, how many are new, how many came before."""


class Pass:
    """What the scheduler decided on, for this pass and the ``stable_for - 1`` passes after it."""

    __slots__ = ("chunks", "context", "decoding", "drafted", "stable_for")

    def __init__(
        self,
        chunks: Sequence[Chunk],
        decoding: int,
        context: int,
        *,
        drafted: Sequence[tuple[Job, int]] = (),
        stable_for: int = 1,
    ) -> None:
        self.chunks = chunks
        self.decoding = decoding
        """How many jobs decode in it."""
        self.context = context
        """The decoding jobs' summed lengths, the tokens being computed included."""
        self.drafted = drafted
        """Those of them that verify drafts, and how many tokens each computes."""
        self.stable_for = stable_for
        """So many passes from this one on are the same decode steps, if nothing comes from outside. 1 where it has chunks or
        drafts."""
