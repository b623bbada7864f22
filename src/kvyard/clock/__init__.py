"""Time, in integer nanoseconds. Nothing else in kvyard reads a clock or sleeps.

Integers add up exactly and compare equal on every machine, which is what makes a run repeatable. Convert at the edges
(``from_seconds``, ``to_ms``), and ask a ``Clock`` for the time: a ``VirtualClock`` where time is told, a ``WallClock``
where it passes.
"""

from kvyard.clock.clock import Clock, ClockError, VirtualClock, WallClock
from kvyard.clock.pause import pause
from kvyard.clock.units import MS, SECOND, US, from_ms, from_seconds, to_ms, to_seconds

__all__ = [
    "MS",
    "SECOND",
    "US",
    "Clock",
    "ClockError",
    "VirtualClock",
    "WallClock",
    "from_ms",
    "from_seconds",
    "pause",
    "to_ms",
    "to_seconds",
]
