"""Round values in order between two ends: all if there are few, else some per doubling."""

from collections.abc import Callable

from kvyard.clock import MS, SECOND, US
from kvyard.units import UNITS

MOST = 64
"""Up to this many whole numbers are all taken."""
IN_TWOS = 2, (1.0, 1.25, 1.5, 1.75)
IN_TENS = 10, (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
SMALLEST = 1 << 10
"""From 0 the first step is to the high end divided by this."""
BYTES = ("TiB", "GiB", "MiB", "KiB")
TIMES = {"s": SECOND, "ms": MS, "us": US, "ns": 1}

Ladder = list[tuple[object, float]]
"""Values as settings take them, with the same as numbers."""


def counts(low: int, high: int) -> Ladder:
    """Return whole numbers."""
    return _made(low, high, lambda value: value, IN_TWOS)


def sizes(low: int, high: int) -> Ladder:
    """Return sizes in bytes, as text with a unit."""
    return _made(low, high, as_size, IN_TWOS)


def durations(low: int, high: int) -> Ladder:
    """Return durations, as text with a unit."""
    return _made(low, high, as_duration, IN_TENS)


def as_size(value: int) -> object:
    """Return ``value`` with the largest unit of which it is some quarters; bytes as they are where there is none."""
    for unit in BYTES:
        if value >= UNITS[unit] and not value * 4 % UNITS[unit]:
            return f"{value / UNITS[unit]:.2f}".rstrip("0").rstrip(".") + unit
    return value


def as_duration(value: int) -> object:
    """Return ``value`` in nanoseconds, with a unit; 0 needs none."""
    for unit, length in TIMES.items():
        if value >= length and not value * 10 % length:
            return f"{value // length if not value % length else value / length}{unit}"
    return 0


def _made(low: int, high: int, shown: Callable[[int], object], steps: tuple[int, tuple[float, ...]]) -> Ladder:
    if high - low < MOST:
        return [(shown(value), float(value)) for value in range(low, high + 1)]
    times, parts = steps
    values = {low, high}
    start = max(1, low or high // SMALLEST)
    base = 1
    while base <= high:
        values.update(value for part in parts if start <= (value := int(base * part)) <= high)
        base *= times
    return [(shown(value), float(value)) for value in sorted(values)]
