"""Findings of the doctor: plain values."""

from __future__ import annotations

import msgspec


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing worth saying."""

    code: str
    where: str
    """The endpoint or file."""
    broken: bool
    """Whether it keeps the prompt from matching or the answer from being trusted; else it is only good to know."""
    seen: str
    means: str
    fix: str


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller's router or index takes for granted."""

    block_size: int | None = None
    algorithm: str | None = None
    seed: str | None = None
