"""Figures in words."""

from __future__ import annotations

import pytest

from kvyard.replay.report.words import failed_workers, span


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.04, "0.0 s"),
        (119.9, "119.9 s"),
        (120, "2 min 0 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 0 min"),
        (7260.4, "2 h 1 min"),
    ],
)
def test_stretches_of_time(seconds: float, words: str) -> None:
    assert span(seconds) == words


def test_workers_that_failed() -> None:
    kinds = [{"count": 3, "fail": None}, {"count": 1, "fail": 120 * 10**9}, {"count": 2, "fail": 10**9}]
    assert failed_workers({"workers": kinds}) == "1 worker failed after 2 min 0 s, 2 workers failed after 1.0 s"
    assert failed_workers({}) == failed_workers({"workers": [{"count": 4}, 3]}) == ""
