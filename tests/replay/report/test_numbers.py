"""Spreads and histograms, against counting by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict

from kvyard.replay.report.numbers import SMALLEST, STEPS, Histogram, Spread, histogram, spread, weighted

LOTS = st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 5)), min_size=1, max_size=40)


@given(LOTS)
def test_a_spread_is_that_of_the_values_written_out(lot: list[tuple[int, int]]) -> None:
    flat = sorted(value / 1000 for value, count in lot for _ in range(count))
    found = weighted(np.array([value for value, _ in lot]), np.array([count for _, count in lot]), 1000)
    same = spread(flat)
    assert asdict(found) == pytest.approx(
        asdict(same), abs=1e-6
    )  # equal values may have a deviation of a rounding error
    mean = math.fsum(flat) / len(flat)
    assert found.count == len(flat)
    assert found.mean == pytest.approx(mean)
    assert (found.min, found.max) == (flat[0], flat[-1])
    for share, value in ((0.5, found.p50), (0.9, found.p90), (0.95, found.p95), (0.99, found.p99)):
        assert value == flat[math.ceil(share * (len(flat) - 1) - 0.5)]
    assert found.std == pytest.approx(math.sqrt(math.fsum((one - mean) ** 2 for one in flat) / len(flat)), abs=1e-6)


@pytest.mark.parametrize("count", range(1, 13))
def test_the_middle_of_an_even_number_of_values_is_the_lower_of_two(count: int) -> None:
    assert spread(range(count)).p50 == (count - 1) // 2


@given(LOTS)
def test_a_histogram_counts_every_value_once_and_in_its_step(lot: list[tuple[int, int]]) -> None:
    values = np.array([value for value, _ in lot])
    counts = np.array([count for _, count in lot])
    found = histogram(values, counts, 1000)
    flat = [value / 1000 for value, count in lot for _ in range(count)]
    assert found.zeros == sum(one < SMALLEST for one in flat)
    assert found.zeros + sum(found.counts) == len(flat)
    ends = found.ends
    assert len(ends) == (len(found.counts) + 1 if found.counts else 0)
    for low, high, count in zip(ends, ends[1:], found.counts, strict=False):
        # A value at the very end of a step may fall on either side of it.
        assert sum(low * (1 + 1e-9) < one <= high * (1 - 1e-9) for one in flat) <= count
        assert sum(low * (1 - 1e-9) < one <= high * (1 + 1e-9) for one in flat) >= count
    assert not found.counts or (found.counts[0] and found.counts[-1])


def test_nothing_has_no_spread() -> None:
    assert spread([]) == Spread()
    assert histogram([]) == Histogram()
    assert histogram([0, 0]) == Histogram(zeros=2)


def test_steps_double() -> None:
    found = histogram([1.0, 2.0, 4.0])
    assert found.first == 0
    assert [at for at, count in enumerate(found.counts) if count] == [0, STEPS, 2 * STEPS]
    assert found.ends[1] == 1.0 and found.ends[-1] == 4.0
