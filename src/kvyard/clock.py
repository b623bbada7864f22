"""Time, in integer nanoseconds. Nothing else in kvyard reads a clock or sleeps.

Integers add up exactly and compare equal on every machine, which is what makes a run repeatable. Convert at the edges
(``from_seconds``, ``to_seconds``), and ask a ``Clock`` for the time: a ``VirtualClock`` where time is set, a ``WallClock``
where it passes.
"""

import time
from decimal import Decimal
from fractions import Fraction
from typing import Protocol, TypeAlias

from kvyard.errors import KvyardError

US = 1_000
MS = 1_000_000
SECOND = 1_000_000_000

Number: TypeAlias = int | float | str | Decimal | Fraction
"""A length of time as written: text and decimals are taken at their word, floats at their exact value."""


def written_now(form: str) -> str:
    """Return the local date and time formatted by ``strftime``, for texts that must contain it, such as chat templates."""
    return time.strftime(form)


def cpu_seconds() -> float:
    """Return processor time of this process so far, for those who keep their own use of it small."""
    return time.process_time()


def from_seconds(seconds: Number) -> int:
    """Return nanoseconds, rounded once, to the nearest (a half to the even one). Raises ``KvyardError`` for a value that isn't
    a number.
    """
    return _scaled(seconds, SECOND, "seconds")


def from_ms(milliseconds: Number) -> int:
    """Convert milliseconds to nanoseconds."""
    return _scaled(milliseconds, MS, "milliseconds")


def to_seconds(ns: int) -> float:
    """Return the float nearest to ``ns`` in seconds, for people and reports."""
    return ns / SECOND


def _scaled(value: Number, unit: int, name: str) -> int:
    if isinstance(value, int):
        return value * unit
    try:
        return round(Fraction(value) * unit)
    except (ValueError, OverflowError, ZeroDivisionError):
        raise KvyardError(f"{value!r} is not a number of {name}") from None


class ClockError(KvyardError, ValueError):
    """Time would have to run backwards, or at no speed at all."""


class Clock(Protocol):
    """The time, and waiting for it. Times are nanoseconds on the clock's own scale and never go back."""

    def now(self) -> int:
        """Return the time."""
        ...

    def sleep_until(self, t: int) -> None:
        """Return once ``now()`` is ``t`` or later; at once where it already is."""
        ...

    async def wait_until(self, t: int) -> None:
        """Wait until ``t`` while the event loop runs other tasks."""
        ...


class VirtualClock:
    """Clock that stands still until its time is set. Waiting for a time sets it."""

    __slots__ = ("_now",)

    def __init__(self, start: int = 0) -> None:
        self._now = start

    def now(self) -> int:
        """Return the latest time set."""
        return self._now

    def advance(self, t: int) -> None:
        """Make it ``t``. Raises ``ClockError``, and stays, where that is in the past."""
        if t < self._now:
            raise ClockError(f"time doesn't run backwards: it is {self._now} ns, not {t} ns")
        self._now = t

    def sleep_until(self, t: int) -> None:
        """Make it ``t``, unless it is later already."""
        self._now = max(self._now, t)

    async def wait_until(self, t: int) -> None:
        """Let other tasks have their turn, then make it ``t``, unless it is later already."""
        await pause()
        self.sleep_until(t)


class WallClock:
    """Starts at ``start`` and passes ``speed`` times as fast as real time; settings of the system's clock don't touch it."""

    __slots__ = ("_origin", "_rate", "_real", "_start", "_unrate")

    def __init__(self, start: int = 0, speed: int | float | Fraction = 1) -> None:
        """Start now. Raises ``ClockError`` for a speed that isn't a positive number."""
        try:
            self._rate = speed.as_integer_ratio()
        except (ValueError, OverflowError):
            self._rate = (0, 1)
        if self._rate[0] <= 0:
            raise ClockError(f"a clock's speed must be a positive number, got {speed}")
        self._unrate = self._rate[1] / self._rate[0] / SECOND
        self._start = start
        self._origin = time.monotonic_ns()
        self._real = self._rate == (1, 1)

    @classmethod
    def since_epoch(cls) -> "WallClock":
        """Return a clock that shows the nanoseconds since 1970, as wires want them: the date is read once, then time only
        passes."""
        return cls(time.time_ns())

    def now(self) -> int:
        """Return the time."""
        passed = time.monotonic_ns() - self._origin
        if not self._real:
            over, under = self._rate
            passed = passed * over // under
        return self._start + passed

    def sleep_until(self, t: int) -> None:
        """Block the thread until it is ``t``."""
        while (left := t - self.now()) > 0:
            time.sleep(left * self._unrate)

    async def wait_until(self, t: int) -> None:
        """Suspend the task until it is ``t``; other tasks get a turn even where it already is."""
        await pause()
        while (left := t - self.now()) > 0:
            await pause(left * self._unrate)


async def pause(seconds: float = 0.0) -> None:
    """Suspend the task for ``seconds`` of real time, for servers; 0 yields to the other tasks once."""
    import asyncio  # slow to load, and most commands never wait

    await asyncio.sleep(seconds)
