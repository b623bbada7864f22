"""Shared parts of the doctor's rules: the expectations they compare with, and their findings, whose texts are in
``texts.toml``."""

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


def broken(name: str, where: str, **values: Any) -> Finding:
    """Return a finding that keeps the prompt from matching, or the answer from being trusted."""
    return _TEXTS.finding(name, Severity.PROBLEM, where=where, **values)


def note(name: str, where: str, **values: Any) -> Finding:
    """Return a finding that is good to know."""
    return _TEXTS.finding(name, Severity.NOTE, where=where, **values)
