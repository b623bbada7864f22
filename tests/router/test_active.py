"""Loads in order."""

from __future__ import annotations

from kvyard.router.active import BLOCKS, ActiveLoads


def test_who_comes_later_has_a_rank_at_once() -> None:
    loads = ActiveLoads(16)
    loads.grow(2)
    ranking = loads.rank_by(BLOCKS)
    loads.grow(40)
    assert ranking.least((1 << 40) - 1) == (0, 0.0, (1 << 40) - 1)
