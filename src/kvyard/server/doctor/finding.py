"""Shared parts of the doctor's rules: the expectations they compare with, and their findings, whose texts are in
``texts.toml``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvyard.events.check import Finding, Severity, Texts

_TEXTS = Texts(Path(__file__).with_name("texts.toml"))


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """Assumptions of the caller's router or index."""

    model: str | None = None
    block_size: int | None = None
    algorithm: str | None = None
    seed: str | None = None


def parting(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences of tokens."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def broken(name: str, where: str, **values: Any) -> Finding:
    """A finding that keeps the prompt from matching, or the answer from being trusted."""
    return _TEXTS.finding(name, Severity.PROBLEM, where=where, **values)


def note(name: str, where: str, **values: Any) -> Finding:
    """A finding that is good to know."""
    return _TEXTS.finding(name, Severity.NOTE, where=where, **values)
