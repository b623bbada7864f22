"""Fingerprints of the latest batches of a stream."""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from kvyard.events.transport.fingerprints import Fingerprints

STEPS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, (1 << 64) - 1)), max_size=40)


@given(STEPS, st.integers(1, 10), st.integers(0, 1 << 62))
def test_they_are_those_of_the_latest_batches(steps: list[tuple[int, int]], most: int, first: int) -> None:
    prints, model = Fingerprints(most), OrderedDict[int, int]()
    seq = first
    for step, mark in steps:
        seq += step
        prints.add(seq, mark)
        model[seq] = mark
        if len(model) > most:
            model.popitem(last=False)
        assert len(prints) == len(model)
        assert prints.first == next(iter(model))
        for asked in (first, seq - 1, seq, seq + 1, *model):
            assert prints.get(asked) == model.get(asked)
            assert (asked in prints) == (asked in model)
    prints.clear()
    assert len(prints) == 0 and prints.first is None and prints.get(seq) is None


def test_a_batch_takes_sixteen_bytes() -> None:
    prints = Fingerprints(4096)
    for seq in range(10_000):
        prints.add(seq, seq * seq)
    assert len(prints) == 4096
    arrays = [value for name in Fingerprints.__slots__ if isinstance(value := getattr(prints, name), array)]
    assert sum(map(sys.getsizeof, arrays)) < 4096 * 16 * 1.25
