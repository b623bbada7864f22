"""Health of a server: live, ready and degraded apart, with reasons.

A *live* process answers. A *ready* one can serve requests. A *degraded* one serves them with a problem, such as an engine
without events or a file that can't be written. Each problem is a ``HealthReason`` with a code for machines and a sentence for
people, and is logged on stderr when it begins and ends.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from kvyard.clock import pause

log = logging.getLogger(__name__)

Grade = Literal["unready", "degraded"]
INTERVAL = 1.0
"""Seconds between two looks."""
MOST = 50
"""Reasons in an answer; a fleet may have thousands of streams."""


class HealthReason(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One thing that is not as it should be."""

    code: str
    """For machines, such as ``stream-stale``."""
    about: str = ""
    """Engine, stream or file."""
    why: str
    grade: Grade = "degraded"


class Readiness(msgspec.Struct, kw_only=True):
    """Answer of /ready: 200 if ready, else 503."""

    live: bool = True
    ready: bool
    degraded: bool
    """True if there is any problem, ready or not."""
    reasons: list[HealthReason] = []


def readiness(reasons: Iterable[HealthReason]) -> Readiness:
    """Return the answer that follows from ``reasons``; those that keep it from being ready come first."""
    ordered = sorted(reasons, key=lambda reason: (reason.grade != "unready", reason))
    ready = not any(reason.grade == "unready" for reason in ordered)
    return Readiness(ready=ready, degraded=bool(ordered), reasons=ordered[:MOST])


async def say_health(reasons: Callable[[], Iterable[HealthReason]]) -> None:
    """Look each second, and say on stderr what begins and ends to be wrong."""
    log = HealthLog()
    while True:
        await pause(INTERVAL)
        log.look(reasons())


class HealthLog:
    """Says on stderr what begins and ends to be wrong, each once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], HealthReason] = {}

    def look(self, reasons: Iterable[HealthReason]) -> None:
        """Log the reasons that are new, and those that are gone."""
        now = {(reason.code, reason.about): reason for reason in reasons}
        for key, reason in now.items():
            if key not in self._known:
                about = f" ({reason.about})" if reason.about else ""
                log.warning("%s: %s%s: %s", reason.grade, reason.code, about, reason.why)
        for key, reason in self._known.items():
            if key not in now:
                about = f" ({reason.about})" if reason.about else ""
                log.warning("over: %s%s", reason.code, about)
        self._known = now
