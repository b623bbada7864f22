"""Every backend against the naive model, on random stores, removals, clears and lookups over branching chains."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.index.naive import NaiveIndex

from kvyard.errors import KvyardError
from kvyard.hashing import TokenChain, algorithm
from kvyard.index.backend import IndexBackend
from kvyard.index.memory import MemoryIndex

XXH3 = algorithm("xxh3", "index tests")
Make = Callable[[], IndexBackend]
CONTRACT: dict[str, Make] = {"memory": MemoryIndex, "naive": NaiveIndex}


def chains(rng: random.Random, count: int = 12, depth: int = 24) -> list[list[int]]:
    """Chains that share prefixes of random length."""
    texts = [[rng.randrange(50) for _ in range(depth)]]
    for _ in range(count - 1):
        old = rng.choice(texts)
        keep = rng.randrange(depth)
        texts.append(old[:keep] + [rng.randrange(50) for _ in range(depth - keep)])
    return [TokenChain(text, 1, XXH3).hashes(0, depth) for text in texts]  # type: ignore[misc]


def walk(index: IndexBackend, model: IndexBackend, seed: int, steps: int, check: int = 1) -> None:
    rng = random.Random(seed)
    texts = chains(rng)
    for step in range(steps):
        keys = rng.choice(texts)
        low = rng.randrange(len(keys))
        high = rng.randrange(low, len(keys)) + 1
        place = rng.randrange(5)
        deed = rng.random()
        if deed < 0.5:
            parent = keys[low - 1] if low and rng.random() < 0.8 else None
            assert list(index.store(place, keys[low:high], parent)) == list(model.store(place, keys[low:high], parent))
        elif deed < 0.9:
            gone = keys[low:high]
            if rng.random() < 0.4:
                gone.reverse()
            elif rng.random() < 0.3:
                rng.shuffle(gone)
            if rng.random() < 0.2:
                gone = [*gone, *rng.choice(texts)[:3], 12345]
            assert index.remove(place, gone) == model.remove(place, gone)
        elif deed < 0.93:
            assert index.clear(place) == model.clear(place)
        else:
            probe = rng.choice(texts)[low:]
            assert index.holds(place, probe[0]) == model.holds(place, probe[0])
        if step % check == 0:
            index.check_integrity()
            for probe in (rng.choice(texts), [*rng.choice(texts)[low:], 1, 2, 3], []):
                for holes in (False, True):
                    assert index.lookup(probe, holes) == model.lookup(probe, holes)
    for place in range(5):
        found = sorted(key for run in index.held(place) for key in run)
        assert found == sorted(key for run in model.held(place) for key in run)
    assert index.usage().blocks == model.usage().blocks


@given(st.integers(0, 1 << 32))
def test_memory_is_the_naive_model(seed: int) -> None:
    walk(MemoryIndex(), NaiveIndex(), seed, 80)


@pytest.mark.slow
def test_memory_is_the_naive_model_for_long() -> None:
    for seed in range(40):
        walk(MemoryIndex(), NaiveIndex(), seed, 4000, check=7)


@pytest.mark.parametrize("make", CONTRACT.values(), ids=CONTRACT)
class TestContract:
    """D6: one lookup contract, whatever the backend."""

    def test_nothing_asked_nothing_found(self, make: Make) -> None:
        assert make().lookup([]) == []
        assert make().lookup([1, 2]) == []

    def test_a_lookup_ends_at_the_first_hole_by_default(self, make: Make) -> None:
        index = make()
        index.store(0, [1, 2, 3, 4, 5])
        index.store(1, [1, 2])
        index.remove(0, [3])
        assert index.lookup([1, 2, 3, 4, 5]) == [(2, 3)]
        assert index.lookup([1, 2, 3, 4, 5, 6], through_holes=True) == [(2, 3), (3, 0), (5, 1)]

    def test_storing_twice_says_what_was_held(self, make: Make) -> None:
        index = make()
        assert not index.store(0, [1, 2])
        assert list(index.store(0, [1, 2, 3])) == [1, 2]
        assert list(index.store(0, [2, 3, 4], 1)) == [2, 3]
        assert index.lookup([1, 2, 3, 4]) == [(4, 1)]

    def test_a_key_listed_twice_was_held_the_second_time(self, make: Make) -> None:
        index = make()
        assert list(index.store(0, [1, 2, 1, 3, 3])) == [1, 3]
        assert list(index.store(1, [1, 1])) == [1]
        index.check_integrity()

    def test_removing_what_is_not_held_changes_nothing(self, make: Make) -> None:
        index = make()
        index.store(0, [1, 2])
        assert index.remove(1, [1, 2]) == 0
        assert index.remove(0, [7]) == 0
        assert index.lookup([1, 2]) == [(2, 1)]

    def test_clearing_isolates_places(self, make: Make) -> None:
        index = make()
        index.store(0, [1, 2])
        index.store(1, [1, 2])
        assert index.clear(0) == 2
        assert index.clear(0) == 0
        assert index.lookup([1, 2]) == [(2, 2)]
        index.store(0, [1])
        assert index.lookup([1, 2]) == [(1, 3), (2, 2)]


def test_more_than_ten_holders_of_one_block_are_all_known() -> None:
    """D17: rows don't forget holders."""
    index = MemoryIndex()
    for place in range(300):
        index.store(place, [1, 2, 3])
    assert index.lookup([1, 2, 3]) == [(3, (1 << 300) - 1)]


def test_a_run_is_stored_once_and_found_by_its_last_key() -> None:
    keys: list[int] = TokenChain(range(4000), 1, XXH3).hashes(0, 4000)  # type: ignore[assignment]
    index = MemoryIndex()
    for place in range(8):
        for start in range(0, 4000, 64):
            index.store(place, keys[start : start + 64], keys[start - 1] if start else None)
    assert index.usage().rows == 1
    assert index.lookup(keys) == [(4000, 255)]
    index.remove(3, keys[2000:][::-1])
    assert index.lookup(keys) == [(2000, 255), (4000, 255 ^ 8)]
    index.store(3, keys[2000:], keys[1999])
    assert index.usage().rows == 1


def test_a_budget_is_kept_by_forgetting_what_is_of_least_use() -> None:
    budget = 1 << 20
    index = MemoryIndex(budget=budget)
    hot: list[int] = TokenChain(range(64), 1, XXH3).hashes(0, 64)  # type: ignore[assignment]
    index.store(0, hot)
    for text in range(300):
        keys: list[int] = TokenChain([text + 1000] * 64, 1, XXH3).hashes(0, 64)  # type: ignore[assignment]
        index.store(text % 3, keys)
        index.lookup(hot)
        assert index.usage().bytes <= budget
    assert index.lookup(hot) == [(64, 1)]
    assert index.usage().evicted > 0
    index.check_integrity()
    with pytest.raises(KvyardError, match="at least"):
        MemoryIndex(budget=1000)
