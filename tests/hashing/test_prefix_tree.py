"""Shared functions of prefix trees, against the same thing done block by block."""

from __future__ import annotations

from array import array
from itertools import accumulate, pairwise, takewhile

from hypothesis import given
from hypothesis import strategies as st

from kvyard.hashing.prefix_tree import common_length, paint, parting, repaint


@given(st.integers(1, 60), st.integers(0, 60), st.integers(0, 5), st.integers(0, 5))
def test_chains_part_at_the_first_position_where_they_differ(same: int, more: int, left: int, right: int) -> None:
    """Of position ``p`` each chain has only keys from its base on."""
    first = list(range(same)) + [1000 + at for at in range(more + 1)]
    second = list(range(same)) + [2000 + at for at in range(more + 1)]
    low = min(max(left, right), same - 1)
    left, right = min(left, low), min(right, low)
    assert parting(first[left:], second[right:], low, same + more, left, right) == same


@given(st.binary(max_size=40), st.binary(max_size=20), st.binary(max_size=20))
def test_a_common_length_is_that_of_item_by_item(start: bytes, left: bytes, right: bytes) -> None:
    first, second = start + left, start + right
    alike = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))
    assert common_length(first, second) == alike
    assert common_length(list(first), list(second)) == alike
    assert common_length(array("Q", list(first)), array("Q", list(second))) == alike


changes = st.lists(
    st.tuples(st.integers(0, 39), st.integers(1, 40), st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=30
)


@given(st.integers(0, 5), changes)
def test_painting_runs_is_painting_blocks(start: int, changes: list[tuple[int, int, int, int]]) -> None:
    stop = start + 40
    stops, masks = [stop], [0]
    blocks = [0] * 40
    for at, count, add, drop in changes:
        low, high = start + at, min(start + at + count, stop)
        before = paint(stops, masks, start, low, high, add, drop)
        assert [mask for a, b, mask in before for _ in range(a, b)] == blocks[low - start : high - start]
        for index in range(low - start, high - start):
            blocks[index] = (blocks[index] | add) & ~drop
        begins = [start, *stops[:-1]]
        assert [mask for a, b, mask in zip(begins, stops, masks, strict=True) for _ in range(a, b)] == blocks
        assert all(one != two for one, two in pairwise(masks)), "equal neighbours are joined"


@given(st.data())
def test_repainting_part_of_a_run_is_painting_its_blocks(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, 5))
    masks = data.draw(
        st.lists(st.integers(0, 3), min_size=1, max_size=6).filter(lambda m: all(a != b for a, b in pairwise(m)))
    )
    stops = list(
        accumulate(data.draw(st.lists(st.integers(1, 4), min_size=len(masks), max_size=len(masks))), initial=start)
    )[1:]
    run = data.draw(st.integers(0, len(masks) - 1))
    begin = stops[run - 1] if run else start
    low = data.draw(st.integers(begin, stops[run] - 1))
    high = data.draw(st.integers(low + 1, stops[run]))
    new = data.draw(st.integers(0, 3).filter(lambda mask: mask != masks[run]))

    def blocks() -> list[int]:
        return [
            mask for first, stop, mask in zip([start, *stops], stops, masks, strict=False) for _ in range(first, stop)
        ]

    expected = blocks()
    expected[low - start : high - start] = [new] * (high - low)
    repaint(stops, masks, start, run, low, high, new)
    assert blocks() == expected and len(stops) == len(masks)
    assert all(one != two for one, two in pairwise(masks)), "runs side by side differ"
    assert all(one < two for one, two in pairwise([start, *stops])), "none is empty"
