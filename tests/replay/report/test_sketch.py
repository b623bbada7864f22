"""Percentiles of a great many values: how far they are off, against all values in order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvyard.replay.report.numbers import spread
from kvyard.replay.report.sketch import RELATIVE_ERROR, Values

VALUES = st.one_of(st.just(0.0), st.floats(1e-3, 1e15), st.integers(1, 1 << 50).map(float))


@given(lots=st.lists(st.lists(VALUES, max_size=20), max_size=6))
def test_a_percentile_is_off_by_so_much_of_itself_at_most(lots: list[list[float]]) -> None:
    exact, sketched = Values(1e6), Values(1e6, exact=False)
    for lot in lots:
        exact.add(np.array(lot))
        sketched.add(np.array(lot))
    expected, found = exact.spread(), sketched.spread()
    assert expected == spread([value for lot in lots for value in lot], 1e6)
    assert sketched.histogram() == exact.histogram()
    assert (found.count, found.min, found.max) == (expected.count, expected.min, expected.max)
    assert found.mean == pytest.approx(expected.mean, rel=1e-9)
    assert found.std == pytest.approx(expected.std, rel=1e-6, abs=1e-7 * max(1e-6, expected.max))
    for part in ("p50", "p90", "p95", "p99"):
        assert getattr(found, part) == pytest.approx(getattr(expected, part), rel=RELATIVE_ERROR * (1 + 1e-9), abs=0)


def test_a_sketch_takes_little_room() -> None:
    values = Values(exact=False)
    values.add(np.geomspace(1, 1e18, 100_000))
    assert len(values._steps) < 21_000, "8 bytes each, whatever the number of values"
