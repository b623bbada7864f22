"""The bounds against caches that work block by block, and against every choice there is."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from functools import cache
from itertools import combinations, groupby, takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.replay.traces.support import CONVERSATION

from kvyard.errors import KvyardError
from kvyard.replay.traces import open_trace
from kvyard.replay.traces.bounds import Accesses, belady, infinite, lru
from kvyard.replay.traces.prefixes import PromptPrefixes

Prompt = tuple[int, ...]
PROMPTS = st.lists(st.lists(st.integers(0, 1), max_size=5).map(tuple), max_size=12)


def ids(prompt: Prompt) -> list[Prompt]:
    """A prefix names itself."""
    return [prompt[: end + 1] for end in range(len(prompt))]


def numbers(prompt: Prompt) -> list[int]:
    """Return the prompt as numbers."""
    return [int("1" + "".join(map(str, one)), 4) for one in ids(prompt)]


def accesses(prompts: list[Prompt], block_size: int = 1, short: int = 0) -> Accesses:
    found = Accesses()
    for prompt in prompts:
        found.add(numbers(prompt), max(0, len(prompt) * block_size - short), block_size)
    return found


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), max_size=9).map(tuple), max_size=40),
    exactly=st.booleans(),
    packed=st.booleans(),
)
def test_the_latest_access_of_each_block(prompts: list[Prompt], exactly: bool, packed: bool) -> None:
    index = PromptPrefixes()
    last: dict[int, int] = {}
    for me, prompt in enumerate(prompts):
        given = numbers(prompt)
        known = list(takewhile(last.__contains__, given))
        wanted = [(owner, len(list(part))) for owner, part in groupby(last[one] for one in known)]
        stretches, there = index.touch(array("q", given) if packed else given, me, exactly)
        assert there == len(known)
        assert [(owner, end - start) for owner, start, end in stretches] == wanted
        assert [start for _, start, _ in stretches] == [0, *(end for _, _, end in stretches)][: len(stretches)]
        last |= dict.fromkeys(given, me)


def naive_lru(prompts: list[list[object]], capacity: int) -> int:
    """Look up the longest resident prefix, then touch front to back, evicting the block touched longest ago."""
    cached: OrderedDict[object, None] = OrderedDict()
    hits = 0
    for blocks in prompts:
        for block in blocks:
            if block not in cached:
                break
            hits += 1
        for block in blocks:
            cached[block] = None
            cached.move_to_end(block)
            if len(cached) > capacity:
                cached.popitem(last=False)
    return hits


def best_of_all(prompts: list[Prompt], capacity: int) -> int:
    """The most hits over every way to choose what to keep."""

    @cache
    def best(at: int, kept: frozenset[Prompt]) -> int:
        if at == len(prompts):
            return 0
        blocks = ids(prompts[at])
        hits = next((i for i, block in enumerate(blocks) if block not in kept), len(blocks))
        there = sorted(kept | set(blocks))
        most = min(capacity, len(there))
        return hits + max(best(at + 1, frozenset(choice)) for choice in combinations(there, most))

    return best(0, frozenset())


@given(PROMPTS, st.integers(0, 12))
def test_lru_is_that_of_a_cache_that_works_block_by_block(prompts: list[Prompt], capacity: int) -> None:
    (found,) = lru(accesses(prompts), [capacity])
    assert found.blocks == naive_lru([ids(prompt) for prompt in prompts], capacity)
    assert found.all_blocks == sum(map(len, prompts))


@given(st.lists(st.lists(st.integers(0, 1), max_size=3).map(tuple), max_size=6), st.integers(0, 4))
def test_belady_is_the_best_of_all_choices(prompts: list[Prompt], capacity: int) -> None:
    assert belady(accesses(prompts), [capacity]) == [best_of_all(prompts, capacity)]


@given(PROMPTS)
def test_bounds_are_in_order(prompts: list[Prompt]) -> None:
    found = accesses(prompts)
    capacities = list(range(14))
    recent, best = [hits.blocks for hits in lru(found, capacities)], belady(found, capacities)
    everything = infinite(found).blocks
    assert recent == sorted(recent) and best == sorted(best)
    assert all(low <= high <= everything for low, high in zip(recent, best, strict=False))
    assert everything == sum(map(len, prompts)) - len({block for prompt in prompts for block in ids(prompt)})
    assert found.unique == len({block for prompt in prompts for block in ids(prompt)})


@given(PROMPTS)
def test_a_cache_one_larger_than_the_distance_hits(prompts: list[Prompt]) -> None:
    found = accesses(prompts)
    for distance in set(found.distance):
        before, after = lru(found, [distance, distance + 1])
        here = sum(length for length, far in zip(found.length, found.distance, strict=False) if far == distance)
        assert after.blocks - before.blocks == here


def test_tokens_of_a_partial_last_block() -> None:
    found = Accesses()
    found.add([1, 2, 3], 40, 16)
    found.add([1, 2, 3], 40, 16)
    found.add([1, 2, 4], 40, 16)
    hits = infinite(found)
    assert (hits.tokens, hits.all_tokens) == (40 + 32, 120)
    assert (hits.blocks, hits.all_blocks) == (5, 9)


@pytest.mark.parametrize("second", [[2], [3, 2], [5, 2]])
def test_ids_that_name_blocks_and_not_prefixes_are_refused(second: list[int]) -> None:
    found = Accesses()
    found.add([1, 2])
    found.add([3, 4])
    with pytest.raises(KvyardError, match="--chain-ids"):
        found.add(second)
        found.add([1, 2])


def test_negative_capacities_are_refused() -> None:
    for bound in (lru, belady):
        with pytest.raises(KvyardError, match="-1"):
            bound(accesses([(0,)]), [-1])


def test_on_a_real_trace_lru_is_that_of_a_cache_that_works_block_by_block() -> None:
    found = Accesses()
    prompts = [request.ids for request in open_trace(CONVERSATION, limit=3000)]
    for prompt in prompts:
        found.add(prompt)
    capacities = [10, 500, 5000, 20000]
    assert [hits.blocks for hits in lru(found, capacities)] == [naive_lru(prompts, one) for one in capacities]
