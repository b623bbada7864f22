"""Settings as people write them: 20k blocks, 200GiB, 50ms, 32/24 GB/s. From text or a plain value to one of the right kind.

Python callers may pass the value itself; the command line and files pass text. Both end up equal.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NoReturn

from kvyard.clock.units import MS, SECOND, US
from kvyard.engine.models.units import parse_bytes
from kvyard.errors import KvyardError

COUNTS = {"": 1, "k": 1_000, "m": 1_000_000, "g": 1_000_000_000}
TIMES = {"ns": 1, "us": US, "µs": US, "ms": MS, "s": SECOND, "m": 60 * SECOND, "min": 60 * SECOND, "h": 3600 * SECOND}
NO_LIMIT = "unlimited"
_NUMBER = r"\s*(\d[\d_]*(?:\.\d+)?)\s*"


def count(name: str, value: object) -> int:
    """A whole number: 20000, ``"20k"``, ``"1.5m"``."""
    if isinstance(value, bool):
        _refuse(name, value, "a whole number such as 500, 20k or 1.5m")
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    found = re.fullmatch(_NUMBER + r"([kmgKMG]?)", value) if isinstance(value, str) else None
    if found is not None:
        exact = Fraction(found[1].replace("_", "")) * COUNTS[found[2].lower()]
        if exact.denominator == 1:
            return int(exact)
    if isinstance(value, str) and re.fullmatch(r"\s*-\d+\s*", value):
        return int(value)
    _refuse(name, value, "a whole number such as 500, 20k or 1.5m")


def number(name: str, value: object) -> float:
    """A number."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            pass
    _refuse(name, value, "a number")


def flag(name: str, value: object) -> bool:
    """Yes or no."""
    if isinstance(value, bool):
        return value
    found = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if isinstance(value, str) and value.strip().lower() in found:
        return found[value.strip().lower()]
    _refuse(name, value, "true or false")


def text(name: str, value: object) -> str:
    """A name."""
    if isinstance(value, str) and value.strip():
        return value.strip()
    _refuse(name, value, "a name")


def size(name: str, value: object) -> int:
    """Bytes: 1073741824, ``"200GiB"``."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        try:
            return parse_bytes(value)
        except KvyardError:
            pass
    _refuse(name, value, "a size in bytes such as 200GiB or 80GB")


def duration(name: str, value: object) -> int:
    """Nanoseconds, from text with a unit: ``"50ms"``, ``"2.5s"``, ``"10min"``. 0 needs none."""
    if value in (0, "0") and not isinstance(value, bool):
        return 0
    found = re.fullmatch(_NUMBER + r"([a-zµ]+)", value) if isinstance(value, str) else None
    if found is not None and found[2] in TIMES:
        return round(Fraction(found[1].replace("_", "")) * TIMES[found[2]])
    _refuse(name, value, "a length of time with its unit, such as 50ms, 2.5s or 10min")


def bandwidth(name: str, value: object) -> tuple[int | None, int | None]:
    """Bytes per second out of the device and back into it, from GB/s: 32, ``"32"``, ``"32/24"``, ``"unlimited"``."""
    parts = value.split("/") if isinstance(value, str) else [value]
    if len(parts) <= 2:
        found = [_one_way(part) for part in parts]
        if all(way != 0 for way in found):
            return found[0], found[-1]
    _refuse(name, value, "GB/s above 0, for both ways or out/back, such as 32 or 32/24, or unlimited")


def _one_way(value: object) -> int | None:
    if value == NO_LIMIT:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
        return round(Fraction(value) * 10**9)
    found = re.fullmatch(_NUMBER + r"(?:GB/s)?", value) if isinstance(value, str) else None
    return round(Fraction(found[1]) * 10**9) if found is not None else 0


def _refuse(name: str, value: object, wanted: str) -> NoReturn:
    raise KvyardError(f"{name} is {value!r}: it must be {wanted}")


Parser = Callable[[str, object], Any]
