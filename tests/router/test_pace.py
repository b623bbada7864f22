"""How fast an engine is, learnt from first tokens."""

from __future__ import annotations

import pytest

from kvyard.router.pace import PaceBook, RelativePace, _solved


def test_two_factors_are_fitted_only_if_they_can_be_separated() -> None:
    # y = 2 x + 3 p, at (1, 0), (0, 1) and (1, 1).
    assert _solved(2.0, 1.0, 2.0, 7.0, 8.0) == pytest.approx((2.0, 3.0))
    # All prompts had nothing cached, or the same share: the second factor would be made up.
    assert _solved(4.0, 0.0, 0.0, 8.0, 0.0) == (2.0, 0.0)
    assert _solved(4.0, 4.0, 4.0, 8.0, 8.0) == (2.0, 0.0)
    assert _solved(0.0, 0.0, 0.0, 0.0, 0.0) == (0.0, 0.0)


def test_one_that_is_not_seen_for_some_first_tokens_is_tried_as_the_fastest() -> None:
    """Every slot is looked at in its turn, by the number of first tokens that the fleet had."""
    book = PaceBook()
    for slot in range(2):
        book.put(slot, None)
    for _ in range(50):
        book.observe(0, 1000, 100.0, 0)
        book.observe(1, 1000, 400.0, 0)
    slow = book.all[1]
    assert slow.prefill(1000) > 2 * book.all[0].prefill(1000)
    for _ in range(RelativePace.TRIAL):
        book.observe(0, 1000, 100.0, 0)
    assert slow.prefill(1000) > 1.5 * book.all[0].prefill(1000)
    book.observe(0, 1000, 100.0, 0)  # the 109th first token: the turn of slot 1
    assert slow.prefill(1000) == book.all[0].prefill(1000)
