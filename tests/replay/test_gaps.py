"""Gaps between tokens: counted alike whether they lie close together or far apart."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvyard.clock import US
from kvyard.replay import gaps as module
from kvyard.replay.gaps import Gaps

DURATIONS = st.one_of(st.integers(0, 50_000_000), st.integers(0, 10**13))


@pytest.mark.source
@given(
    parts=st.lists(st.tuples(st.lists(DURATIONS, max_size=6), st.integers(0, 300)), max_size=12),
    singles=st.lists(st.tuples(DURATIONS, st.integers(0, 300)), max_size=12),
    room=st.sampled_from([1, 4, 1 << 16]),
)
def test_every_gap_is_counted(parts: list[tuple[list[int], int]], singles: list[tuple[int, int]], room: int) -> None:
    expected: Counter[int] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_ROOM", room)
        patch.setattr(module, "_FRESH", room)
        gaps = Gaps()
        for durations, count in parts:
            gaps.add(np.array(durations, dtype=np.int64), count)
            for duration in durations:
                expected[(duration + US // 2) // US * US] += count
        for duration, count in singles:
            gaps.add_one(duration, count)
            expected[(duration + US // 2) // US * US] += count
        durations_, counts = gaps.columns()
    assert dict(zip(durations_.tolist(), counts.tolist(), strict=False)) == +expected
    assert durations_.tolist() == sorted(+expected)


@pytest.mark.source
def test_unsorted_gaps_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FRESH", 100)
    found = Gaps()
    for at in range(1000):
        found.add(np.arange(at, at + 30, dtype=np.int64) * 1000, 2)
        found.add_one(at * 1000, 1)
        assert len(found._plans) < 100 and len(found._singles) < 100
    durations, counts = found.columns()
    assert counts.sum() == 1000 * 61 and len(durations) == 1029
