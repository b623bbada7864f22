"""Preemption storms: requests are preempted repeatedly, and none makes progress. Reproducers contain this module."""

from __future__ import annotations

STORM_AFTER = 64
"""Preemptions in a row between which no request had a token computed that it never had before."""


class Storms:
    """Counts preemptions, and those since a request last got on.

    Preemptions alone are no defect: in a small pool a request may be preempted for each block that another one needs, as
    long as the other one gets on.
    """

    def __init__(self) -> None:
        self._reached: dict[str, int] = {}
        """The most tokens of a request that were computed at any time."""
        self._preempted: dict[str, int] = {}
        self._in_vain = 0

    @property
    def preemptions(self) -> int:
        """Preemptions of all requests."""
        return sum(self._preempted.values())

    def compute(self, name: str, tokens: int) -> None:
        """The first ``tokens`` tokens of a request are computed."""
        if tokens > self._reached.get(name, 0):
            self._reached[name] = tokens
            self._in_vain = 0

    def preempt(self, name: str) -> None:
        """A request is preempted: what was computed of it is lost."""
        self._preempted[name] = self._preempted.get(name, 0) + 1
        self._in_vain += 1

    def finding(self) -> dict[str, str] | None:
        """Return the storm, if there is one."""
        if self._in_vain < STORM_AFTER:
            return None
        often = ", ".join(f"{name} {count} times" for name, count in self._preempted.items())
        detail = f"{STORM_AFTER} preemptions in a row, and no request got on; preempted in all: {often}"
        return {"kind": "storm", "detail": detail}
