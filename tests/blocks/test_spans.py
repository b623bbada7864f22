"""Intervals are sets of positions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.blocks.support import spans_of

from kvyard.blocks.spans import clip, intersect, overlaps, unite, without

positions = st.sets(st.integers(0, 30), max_size=20)


@given(positions, positions, st.integers(0, 30), st.integers(0, 30))
def test_intervals_are_sets(left: set[int], right: set[int], low: int, high: int) -> None:
    assert unite(spans_of(left), spans_of(right)) == spans_of(left | right)
    assert intersect(spans_of(left), spans_of(right)) == spans_of(left & right)
    asked = set(range(low, high))
    assert without(low, high, spans_of(left)) == spans_of(asked - left)
    assert clip(spans_of(left), low, high) == spans_of(asked & left)
    assert overlaps(low, high, spans_of(left)) == bool(asked & left)
