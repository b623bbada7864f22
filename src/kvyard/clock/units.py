"""Nanoseconds from and to the units that people and files write. It knows no clock."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import TypeAlias

from kvyard.errors import KvyardError

US = 1_000
MS = 1_000_000
SECOND = 1_000_000_000

Number: TypeAlias = int | float | str | Decimal | Fraction
"""A length of time as written: text and decimals are taken at their word, floats at their exact value."""


def from_seconds(seconds: Number) -> int:
    """Nanoseconds, rounded once, to the nearest (a half to the even one). Raises ``KvyardError`` for what isn't a number."""
    return _scaled(seconds, SECOND, "seconds")


def from_ms(milliseconds: Number) -> int:
    """The same from milliseconds."""
    return _scaled(milliseconds, MS, "milliseconds")


def to_seconds(ns: int) -> float:
    """The float nearest to ``ns`` in seconds, for people and reports."""
    return ns / SECOND


def to_ms(ns: int) -> float:
    """The float nearest to ``ns`` in milliseconds."""
    return ns / MS


def _scaled(value: Number, unit: int, name: str) -> int:
    if isinstance(value, int):
        return value * unit
    try:
        return round(Fraction(value) * unit)
    except (ValueError, OverflowError, ZeroDivisionError):
        raise KvyardError(f"{value!r} is not a number of {name}") from None
