"""Garbage searches around a replay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from kvyard.replay.garbage import rarely_collected

MANY = 50_000
"""Objects that the usual thresholds search dozens of times while they are made."""


@pytest.fixture
def searched() -> Iterator[list[int]]:
    """Objects that are in a generation when it is searched, search by search."""
    counts: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            counts.append(sum(len(gc.get_objects(number)) for number in range(info["generation"] + 1)))

    gc.collect()
    gc.callbacks.append(note)
    yield counts
    gc.callbacks.remove(note)


def test_objects_made_in_the_block_are_not_collected_at_its_end(searched: list[int]) -> None:
    """A fleet of 10,000 workers is a million objects, and the first object after it would start a search of them."""
    kept: list[Any] = []
    with rarely_collected():
        kept += [[number] for number in range(MANY)]
    kept += [[number] for number in range(2_000)]
    assert searched and max(searched) < MANY
    assert not gc.get_freeze_count()


def test_cycles_of_a_block_are_found_by_the_next_full_search() -> None:
    with rarely_collected():
        for _ in range(100):
            circle: list[Any] = []
            circle.append(circle)
        del circle
    assert gc.collect() >= 100


def test_objects_frozen_elsewhere_stay_frozen() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        with rarely_collected():
            pass
        assert gc.get_freeze_count() == pytest.approx(before, abs=100)
    finally:
        gc.unfreeze()
