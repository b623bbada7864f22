"""A run is a view: slicing and splitting it is slicing and splitting its list of hashes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvyard.hashing import Run, TokenChain, TraceChain, algorithm

XXH3 = algorithm("xxh3", environ={})
CHAIN = TokenChain(range(100), 4, XXH3)
index = st.none() | st.integers(-30, 30)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    start = draw(st.integers(0, 25))
    return Run(CHAIN, start, draw(st.integers(start, 25)))


@given(runs(), index, index)
def test_slicing(run: Run, low: int | None, high: int | None) -> None:
    part = run[low:high]
    assert part.hashes == run.hashes[low:high]
    assert part.chain is CHAIN
    assert len(part) == len(part.hashes)


@given(runs(), st.integers(-30, 30))
def test_indexing(run: Run, at: int) -> None:
    if -len(run) <= at < len(run):
        assert run[at] == run.hashes[at]
    else:
        with pytest.raises(IndexError, match="of a run of"):
            run[at]


@given(runs(), st.integers(-2, 30))
def test_splitting(run: Run, at: int) -> None:
    if not 0 <= at <= len(run):
        with pytest.raises(ValueError, match="cannot split a run"):
            run.split(at)
        return
    front, back = run.split(at)
    assert (len(front), front.start, back.stop) == (at, run.start, run.stop)
    assert front.hashes + back.hashes == run.hashes
    assert (front.tokens or []) + (back.tokens or []) == run.tokens
    assert front.parent == run.parent
    assert back.parent == (front.hashes[-1] if front else run.parent)


@given(runs())
def test_iterating(run: Run) -> None:
    assert list(run) == run.hashes


@given(runs(), runs())
def test_equal_runs_have_equal_hashes_at_equal_places(one: Run, other: Run) -> None:
    assert (one == other) == ((one.start, one.hashes) == (other.start, other.hashes))
    assert one != other or hash(one) == hash(other)


def test_equality_looks_at_content() -> None:
    same, grown, different = (TokenChain(t, 4, XXH3) for t in (range(100), range(120), [9, *range(1, 100)]))
    assert Run(CHAIN, 3, 9) == Run(same, 3, 9) == Run(grown, 3, 9)
    assert Run(CHAIN, 3, 9) != Run(different, 3, 9)
    assert hash(Run(CHAIN, 3, 9)) == hash(Run(grown, 3, 9))
    assert Run(CHAIN) != "a run"


def test_the_whole_chain() -> None:
    run = Run(CHAIN)
    assert (len(run), run.parent) == (25, None)
    assert run.tokens == list(range(100))
    assert repr(run[2:4]) == "Run(2..4 of TokenChain)"


def test_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="step 1"):
        Run(CHAIN)[::2]


def test_a_trace_has_no_tokens() -> None:
    run = Run(TraceChain([7], 512, 512, 16, 0))
    assert (len(run), run.tokens) == (32, None)
    assert list(run) == [7 * 512 + at for at in range(15, 512, 16)]
