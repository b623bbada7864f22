"""Interpolation in measured rows: exact at points, to the bit what the sum of its parts is between them."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvyard.engine.timing.interpolation import across, along, place, row_between

AT, ROWS = (1, 100, 1000), (1, 8, 64)
US = ((1.5, 20.25, 300.1), (4.0, 33.3, 512.7), (9.9, 140.0, 4000.5))


def test_a_row_is_exact_at_its_points_flat_before_and_straight_beyond() -> None:
    assert [along(AT, US[0], x) for x in (0, *AT)] == [1.5, *US[0]]
    assert along(AT, US[0], 1900) == 20.25 + 2.0 * (300.1 - 20.25)
    assert along((7,), (3.0,), 1000) == 3.0


@given(st.floats(1, 2000))
def test_a_value_lies_on_the_line_between_its_neighbours(x: float) -> None:
    for (x0, y0), (x1, y1) in pairwise(zip(AT, US[1], strict=True)):
        if x0 <= x < x1:
            assert along(AT, US[1], x) == y0 + (x - x0) / (x1 - x0) * (y1 - y0)


@given(st.floats(0, 200), st.floats(0, 5000))
def test_a_point_of_a_plane_is_to_the_bit_that_of_its_row(x: float, y: float) -> None:
    assert across(ROWS, AT, US, x, y) == along(AT, row_between(ROWS, US, x), y)
    assert across((1,), AT, US[:1], x, y) == along(AT, US[0], y)


@given(st.lists(st.integers(0, 50), max_size=12, unique=True).map(sorted), st.floats(-5, 60) | st.integers(-5, 60))
def test_a_place_is_that_of_the_last_point_before(axis: list[int], x: float) -> None:
    assert place(tuple(axis), x) == bisect_right(axis, x) - 1
