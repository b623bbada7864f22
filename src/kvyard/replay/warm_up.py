"""Warm-up: the part of a run that fills caches and isn't counted."""

from typing import NamedTuple

from kvyard.errors import KvyardError
from kvyard.settings import duration


class WarmUp(NamedTuple):
    """Part that isn't counted. One of the three."""

    requests: int = 0
    """The first this many requests."""
    time: int = 0
    """Requests that come before this, in nanoseconds from the first arrival."""
    trace: str = ""
    """A trace that is replayed before, to its end."""


NO_WARM_UP = WarmUp()


def parse_warm_up(text: str) -> WarmUp:
    """``2000``, ``5m`` or the name of a trace. Raises ``KvyardError`` for anything else."""
    if text.isdecimal():
        if not int(text):
            raise KvyardError("warm_up is 0: write how many requests aren't counted, or leave it out")
        return WarmUp(requests=int(text))
    try:
        return WarmUp(time=duration("warm_up", text))
    except KvyardError:
        return WarmUp(trace=text)
