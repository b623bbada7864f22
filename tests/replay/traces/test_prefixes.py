"""Who touched which part of a prompt last: against a dict of all prefixes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvyard.replay.traces.prefixes import PromptPrefixes

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=14)


def named(words: list[int]) -> list[int]:
    """Ids that name all that comes before them."""
    ids, above = [], 0
    for word in words:
        above = above * 3 + word + 1
        ids.append(above)
    return ids


@given(PROMPTS, st.booleans())
def test_the_same_as_a_dict_of_all_prefixes(prompts: list[list[int]], exactly: bool) -> None:
    index, last = PromptPrefixes(), dict[int, int]()
    for owner, words in enumerate(prompts):
        ids = named(words)
        found, there = index.touch(ids, owner, exactly)
        known = [last[one] for one in ids if one in last]
        assert there == len(known)
        assert [who for who, start, stop in found for _ in range(start, stop)] == known
        assert all(one[0] != two[0] and one[2] == two[1] for one, two in pairwise(found))
        last.update(dict.fromkeys(ids, owner))


def test_ids_that_differ_between_equal_ones_are_seen_where_all_are_compared() -> None:
    index = PromptPrefixes()
    index.touch([1, 2, 3, 4, 5], 0, True)
    assert index.touch([1, 9, 3, 4, 5], 1, True) == ([(0, 0, 1)], 1)
