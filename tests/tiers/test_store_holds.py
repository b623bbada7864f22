"""What tiers ask of the device's pool: holds that outlive a split, and a way back to the head of the line."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.blocks.support import FULL, cache, make, run

from kvyard.blocks import BlockManager
from kvyard.blocks.integrity import check_pool, reference_counts
from kvyard.hashing import TokenChain, algorithm


def cached(eviction: str = "lru") -> BlockManager:
    """Ten blocks of one text, cached and free, behind nine nameless ones."""
    manager = BlockManager(20, [FULL], eviction=eviction)
    cache(manager, "a", range(40))
    return manager


def test_a_hold_keeps_blocks_out_of_the_line_though_others_split_them() -> None:
    manager = cached()
    pool = manager.pool
    held = pool.holds.pin(list(pool.order))
    assert pool.free == 9
    other = make(manager, "b", [*range(20), *[7] * 8])
    assert run(manager, other)  # hits five of the ten
    assert [len(extent.ids) for extent in held] == [5, 5]
    manager.check_integrity()
    assert sum(count == 2 for count in reference_counts(manager.pool, manager.requests.values()).values()) == 5
    manager.free(other)
    manager.check_integrity()
    assert pool.free == 9
    pool.holds.end(held)
    manager.check_integrity()
    assert pool.free == 19


def test_a_hold_that_nobody_knows_of_is_found() -> None:
    manager = cached()
    manager.pool.holds.pin(list(manager.pool.order))
    manager.pool.holds.tables.clear()
    with pytest.raises(AssertionError, match="I2"):
        manager.check_integrity()


@pytest.mark.parametrize("eviction", ["lru", "priority"])
def test_released_blocks_are_evicted_next_and_can_be_hit(eviction: str) -> None:
    manager = cached(eviction)
    cache(manager, "b", [9] * 20)
    pool = manager.pool
    before = list(pool.line())
    (first, *_) = pool.order
    held = pool.holds.pin([first])
    assert first.ids[-1] not in pool.line()
    pool.split(first, 4)  # somebody else's doing
    pool.holds.cancel(held)
    assert list(pool.line()) == before
    manager.check_integrity()
    assert manager.lookup(make(manager, "c", range(40))).tokens == 36


def test_released_blocks_stay_with_a_request_that_hit_them_meanwhile() -> None:
    manager = cached()
    pool = manager.pool
    held = pool.holds.pin(list(pool.order))
    request = make(manager, "b", range(40))
    assert run(manager, request)
    pool.holds.cancel(held)
    manager.check_integrity()
    # The last block of a prompt is computed again: of the old one nobody is left but the line.
    assert pool.free == 9 and len(list(pool.order)) == 1


def test_new_blocks_for_what_a_transfer_brings() -> None:
    manager = cached()
    pool = manager.pool
    held = pool.holds.take(12, 3)
    assert (held.extents[0].start, held.extents[0].stop, pool.free, pool.unnamed) == (3, 15, 7, 0)
    manager.check_integrity()
    with pytest.raises(ValueError, match="cannot take 8 blocks"):
        pool.holds.take(8, 0)
    pool.holds.end(held)
    check_pool(pool, Counter())
    assert pool.unnamed == 12


def test_a_coarse_chain_shows_its_blocks() -> None:
    chain = TokenChain(range(40), 2, algorithm("xxh3", "x"))
    coarse = chain.coarser(8)
    assert coarse.finer(2) is chain and coarse.finer(8) is coarse
    assert coarse.finer(4).hashes(0, 10) == chain.coarser(4).hashes(0, 10)
    with pytest.raises(ValueError, match="no blocks of 1"):
        chain.finer(1)
