"""Shared parts of the doctor's rules: the expectations they compare with, and their findings, whose texts are in
``texts.toml``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvyard.events.check import Finding, FindingTexts, Severity

_TEXTS = FindingTexts(Path(__file__).with_name("texts.toml"))


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """Assumptions of the caller's router or index."""

    model: str | None = None
    block_size: int | None = None
    algorithm: str | None = None
    seed: str | None = None


def parting(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences of tokens."""
    return next(
        (index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )


def broken(name: str, where: str, **values: Any) -> Finding:
    """Return a finding that keeps the prompt from matching, or the answer from being trusted."""
    return _TEXTS.finding(name, Severity.PROBLEM, where=where, **values)


def note(name: str, where: str, **values: Any) -> Finding:
    """Return a finding that is good to know."""
    return _TEXTS.finding(name, Severity.NOTE, where=where, **values)
