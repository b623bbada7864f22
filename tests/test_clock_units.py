"""Conversions are exact, and say no to what isn't a number."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvyard.clock import MS, SECOND, US, from_ms, from_seconds, to_seconds
from kvyard.errors import KvyardError


def test_units() -> None:
    assert (1000 * US, 1000 * MS) == (MS, SECOND)


@pytest.mark.parametrize(
    ("seconds", "ns"),
    [
        (3, 3 * SECOND),
        (0.1, 100 * MS),
        (0.3, 300 * MS),
        ("0.000000001", 1),
        (Decimal("1.5"), 1_500 * MS),
        (Fraction(1, 3), 333_333_333),
        ("1e-3", MS),
        (-0.25, -250 * MS),
        (1_700_000_000.123456789, 1_700_000_000_123_456_717),  # the float's own value: it has no more digits
        ("2.5e-9", 2),
        ("3.5e-9", 4),
    ],
)
def test_from_seconds(seconds: float, ns: int) -> None:
    assert from_seconds(seconds) == ns


def test_from_ms() -> None:
    assert from_ms(27_482) == 27_482 * MS
    assert from_ms(0.5) == from_seconds("0.0005") == 500 * US


@pytest.mark.parametrize("value", [float("nan"), float("inf"), Decimal("nan"), Decimal("inf"), "soon", "", "1/0"])
def test_values_that_are_no_numbers_are_refused(value: float) -> None:
    with pytest.raises(KvyardError, match="is not a number of seconds"):
        from_seconds(value)


@given(st.integers(-(2**52), 2**52))
def test_there_and_back(ns: int) -> None:
    assert from_seconds(to_seconds(ns)) == ns


@given(st.decimals(-(10**9), 10**9, places=9))
def test_nine_decimals_are_exact(seconds: Decimal) -> None:
    assert from_seconds(seconds) == from_seconds(str(seconds)) == int(seconds.scaleb(9))
