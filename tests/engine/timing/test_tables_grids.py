"""Points that are measured or asked for, between which is interpolated."""

from __future__ import annotations

import pytest

from kvyard.engine.timing import aic
from kvyard.lab.calibrate import plan


@pytest.mark.parametrize(
    "grid", [aic.SEQUENCES, aic.NEW[1:], aic.PAST[1:], aic.BATCHES, aic.CONTEXTS[1:], plan.BATCHES], ids=str
)
def test_each_point_is_twice_the_one_before(grid: tuple[int, ...]) -> None:
    assert grid == tuple(grid[0] << step for step in range(len(grid)))
