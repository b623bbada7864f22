"""Evidence from metrics and events, for causes that hits alone can't distinguish."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvyard.errors import KvyardError
from kvyard.events.check import judge
from kvyard.server.doctor.case import LIMITS, Case, play
from kvyard.server.doctor.case_rules import seeds_differ

MANY = 3
"""Adapters, salts or media under which one text is stored, from which on they are taken to change with every request."""
APART = ("adapters", "salts", "media")
"""Causes by their place in the keys of a block."""


def from_events(recordings: Sequence[Path]) -> set[str]:
    """Return causes that recordings of workers' KV events show. Raises ``KvyardError`` if one has none that can be read."""
    cases = [Case(str(path), replay=None, prompt=None, limits=LIMITS, live=False) for path in recordings]
    for case in cases:
        play(case, case.name)
        if not case.topics and any(finding.code == "bad-payload" for finding in judge(case.checker.facts()).findings):
            raise KvyardError(f"{case.name} has no KV events: kvyard events record writes them")
    causes: set[str] = set()
    if any(True for _ in seeds_differ(cases)):
        causes.add("hash-seed")
    for keys in (keys for case in cases for keys in case.keys.values() if len(keys) >= MANY):
        causes |= {
            code for code, values in zip(APART, zip(*keys, strict=True), strict=True) if len(set(values)) >= MANY
        }
    return causes
