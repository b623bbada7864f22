"""What the doctor's rules share: the expectations they compare with, two texts, and the two kinds of finding they make."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvyard.events.check import Finding, Severity

OTHER_SIZE = (
    "A router that hashes prompts in blocks of another size finds nothing, ever. kvyard's own index translates."
)
SHIFTED = "The tokenizer's special token (BOS) is added on one side only, which shifts every block."


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller's router or index takes for granted."""

    model: str | None = None
    block_size: int | None = None
    algorithm: str | None = None
    seed: str | None = None


def parting(one: Sequence[int], other: Sequence[int]) -> int:
    """Where two sequences of tokens part: how many both begin with."""
    return next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def broken(code: str, where: str, seen: str, means: str, fix: str) -> Finding:
    """A finding that keeps the prompt from matching, or the answer from being trusted."""
    return Finding(code=code, where=where, severity=Severity.PROBLEM, seen=seen, means=means, fix=fix)


def note(code: str, where: str, seen: str, means: str, fix: str) -> Finding:
    """A finding that is good to know."""
    return Finding(code=code, where=where, severity=Severity.NOTE, seen=seen, means=means, fix=fix)
