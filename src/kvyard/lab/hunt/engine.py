"""An engine that can be hunted: how its cases are made and run. ``kvyard.vllm.hunt`` and ``kvyard.sglang.hunt`` have one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import msgspec

Case = dict[str, Any]
"""Plain JSON; ``requests`` is a list, the rest is the engine's own."""
Finding = dict[str, Any]
"""``kind`` and ``detail``."""


class HuntedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """Interface of an engine for the search."""

    title: str
    import_engine: Callable[[], str]
    """Import the engine; returns its version. Raises ``ImportError``."""
    run: Callable[[Case], tuple[Finding | None, float]]
    """Run a case: what went wrong, and how near it came to trouble."""
    draw: Callable[[random.Random], Case]
    change: Callable[[Case, random.Random], Case]
    """A case like the one it receives."""
    smaller: Callable[[Case], Iterator[Case]]
    """Simpler cases, the largest steps first."""
    features: Callable[[Case], set[str]]
    """Features of a case beside plain requests: findings that differ in them are listed apart."""
    plain: Case
    """Settings that need no explanation: a reproducer's case has the others."""
    legend: str
    """Explanation of a case, for the head of a reproducer."""
    sources: tuple[ModuleType, ...]
    """Modules that a reproducer consists of, in order. They import nothing of kvyard but each other."""
