"""How fast an engine is, learnt from first tokens."""

from __future__ import annotations

import pytest

from kvyard.router.pace import _solved


def test_two_factors_where_they_can_be_told_apart_and_one_where_not() -> None:
    # y = 2 x + 3 p, at (1, 0), (0, 1) and (1, 1).
    assert _solved(2.0, 1.0, 2.0, 7.0, 8.0) == pytest.approx((2.0, 3.0))
    # All prompts had nothing cached, or the same share: the second factor would be made up.
    assert _solved(4.0, 0.0, 0.0, 8.0, 0.0) == (2.0, 0.0)
    assert _solved(4.0, 4.0, 4.0, 8.0, 8.0) == (2.0, 0.0)
    assert _solved(0.0, 0.0, 0.0, 0.0, 0.0) == (0.0, 0.0)
