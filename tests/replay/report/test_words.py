"""Figures in words."""

from __future__ import annotations

import pytest

from kvyard.replay.report.words import span


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
