"""A batch: what one pass computes. It knows nothing of how it was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from kvyard.engine.job import Job

Chunk: TypeAlias = tuple[Job, int, int]
"""Part of a job's known tokens, computed in one pass: the job, how many are new, how many came before."""


class Batch:
    """What one pass computes."""

    __slots__ = ("bursts", "chunks", "context", "decoding")

    def __init__(
        self, chunks: Sequence[Chunk], decoding: int, context: int, bursts: Sequence[tuple[Job, int]] = ()
    ) -> None:
        self.chunks = chunks
        self.decoding = decoding
        self.context = context
        """The decoding jobs' summed lengths, the tokens being computed included."""
        self.bursts = bursts
        """Jobs that verify drafts, and how many tokens each computes."""
