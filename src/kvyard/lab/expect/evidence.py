"""Evidence from elsewhere: causes that hits alone can't tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvyard.server.doctor.case import LIMITS, Case, play
from kvyard.server.doctor.case_rules import seeds_differ


def from_events(recordings: Sequence[Path]) -> set[str]:
    """Return causes that recordings of workers' KV events show. Raises ``KvyardError`` where one can't be read."""
    cases = [Case(str(path), replay=None, prompt=None, limits=LIMITS, live=False) for path in recordings]
    for case in cases:
        play(case, case.name)
    found: set[str] = set()
    if any(True for _ in seeds_differ(cases)):
        found.add("hash-seed")
    if cases and not any(case.announced for case in cases):
        found.add("events-off")
    return found
