"""The pool: identity, order and count of blocks are vLLM's, whatever extents they travel in."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from tests.blocks.support import FULL, XXH3, cache, make, run, snapshot

from kvyard.blocks import BlockManager, ConfigError, Pool
from kvyard.blocks.extent import Extent
from kvyard.blocks.integrity import check_pool
from kvyard.hashing import TokenChain


def named(pool: Pool, tokens: list[int], group: int = 0) -> Extent:
    """A held extent that caches this text, two tokens a block."""
    chain = TokenChain(tokens, 2, XXH3)
    extent = Extent(pool.take(len(chain.keys)), 0)
    parts = pool.maps[group].enter(chain, extent)
    assert parts == [extent], "the helper is for texts that nobody has cached"
    return extent


def ids_by_hash(pool: Pool, tokens: list[int]) -> list[list[int]]:
    """The blocks that cache each block of this text in group 0, first registered first."""
    found: dict[object, list[int]] = {}
    for _, key, block in pool.cached_blocks():
        found.setdefault(key, []).append(block)
    return [found.get(key, []) for key in TokenChain(tokens, 2, XXH3).hashes(0, len(tokens) // 2)]


# -- handing out ------------------------------------------------------------------------------------------------------


def test_blocks_are_handed_out_in_order_and_never_the_null_block() -> None:
    pool = Pool(6)
    assert list(pool.line()) == [1, 2, 3, 4, 5]
    assert pool.take(2) == [1, 2]
    assert pool.take(0) == []
    assert pool.take(3) == [3, 4, 5]
    assert pool.free == 0
    assert 0 not in pool.line()


@pytest.mark.parametrize("count", [-1, 6, 100])
def test_too_many_or_negative_are_refused_and_nothing_changes(count: int) -> None:
    pool = Pool(6)
    held = named(pool, [1, 2, 3, 4])
    pool.release([held])
    line = list(pool.line())
    with pytest.raises(ValueError, match=rf"cannot take {count} blocks: 5 are free"):
        pool.take(count)
    assert list(pool.line()) == line == [3, 4, 5, 2, 1]
    assert pool.free == 5
    assert len(list(pool.cached_blocks())) == 2


def test_unnamed_blocks_come_back_to_the_front_the_last_first() -> None:
    pool = Pool(8)
    first, second = Extent(pool.take(2), 0), Extent(pool.take(3), 0)
    pool.release([first])
    assert list(pool.line()) == [2, 1, 6, 7]
    pool.release([second])
    assert list(pool.line()) == [5, 4, 3, 2, 1, 6, 7]


def test_a_batch_comes_back_as_one() -> None:
    """Unnamed ones ahead of everything, named ones behind everything, each from the last position to the first."""
    pool = Pool(10)
    parts = [named(pool, [1, 2, 3, 4]), Extent(pool.take(2), 2), named(pool, [5, 6]), Extent(pool.take(1), 5)]
    pool.release(parts)
    assert list(pool.line()) == [6, 4, 3, 7, 8, 9, 5, 2, 1]
    assert pool.free == 9


def test_an_allocated_block_loses_its_cached_content() -> None:
    pool = Pool(5)
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    pool.release([named(pool, text)])
    assert ids_by_hash(pool, text) == [[1], [2], [3], [4]]
    version = pool.version
    assert pool.take(3) == [4, 3, 2]
    assert ids_by_hash(pool, text) == [[1], [], [], []]
    assert pool.version > version, "what was looked up before must not be trusted any more"
    assert pool.take(1) == [1]
    assert list(pool.cached_blocks()) == []
    assert pool.maps[0].starts == {}


def test_loose_blocks_alone_leave_lookups_valid() -> None:
    pool = Pool(10)
    pool.release([named(pool, [1, 2, 3, 4])])
    version = pool.version
    pool.take(7)
    assert pool.version == version
    pool.take(1)
    assert pool.version > version


def test_usage() -> None:
    pool = Pool(11)
    assert pool.usage == 0.0
    held = named(pool, [1, 2, 3, 4])
    assert pool.usage == pytest.approx(0.2)
    pool.release([held])
    assert pool.usage == 0.0, "cached blocks that nobody holds are free"
    assert Pool(1).usage == 0.0


# -- holding ----------------------------------------------------------------------------------------------------------


def test_a_pinned_extent_is_out_of_the_line_until_its_last_holder_lets_go() -> None:
    pool = Pool(6)
    extent = named(pool, [1, 2, 3, 4])
    pool.release([extent])
    assert list(pool.line()) == [3, 4, 5, 2, 1]
    pool.pin(extent)
    pool.pin(extent)
    assert (extent.refs, pool.free, list(pool.line())) == (2, 3, [3, 4, 5])
    assert pool.take(3) == [3, 4, 5]
    with pytest.raises(ValueError, match="cannot take 1 blocks: 0 are free"):
        pool.take(1)
    pool.release([extent])
    assert (extent.refs, pool.free) == (1, 0)
    pool.release([extent])
    assert (extent.refs, pool.free, list(pool.line())) == (0, 2, [2, 1])


def test_hitting_moves_to_the_back_of_the_line() -> None:
    """Least recently used goes first, and use counts from when the last holder let go."""
    pool = Pool(7)
    first, second = named(pool, [1, 2, 3, 4]), named(pool, [5, 6])
    pool.release([first])
    pool.release([second])
    assert list(pool.line())[3:] == [2, 1, 3]
    pool.pin(first)
    pool.release([first])
    assert list(pool.line())[3:] == [3, 2, 1]


def test_part_of_an_extent_can_be_held() -> None:
    pool = Pool(6)
    extent = named(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    pool.release([extent])
    front = pool.split(extent, 1)
    assert (front.ids, extent.ids) == ([1], [2, 3, 4])
    assert list(pool.line()) == [5, 4, 3, 2, 1], "splitting moves nobody"
    pool.pin(front)
    assert list(pool.line()) == [5, 4, 3, 2]
    pool.release([front])
    check_pool(pool, Counter())


def test_letting_go_of_the_front_only() -> None:
    """As a window does that moves on: the rest stays held, and the front is in line behind those that were before."""
    pool = Pool(12)
    held, other = named(pool, [1, 2, 3, 4, 5, 6, 7, 8]), named(pool, [9, 8, 7, 6])
    pool.release([other])
    pool.release((pool.split(held, 1),))
    pool.release((pool.split(held, 2),))
    assert list(pool.line())[5:] == [6, 5, 1, 3, 2]
    assert (held.ids, held.start, pool.free) == ([4], 3, 10)
    check_pool(pool, Counter([held]))
    assert ids_by_hash(pool, [1, 2, 3, 4, 5, 6, 7, 8]) == [[1], [2], [3], [4]]


def test_letting_go_of_a_front_that_others_hold() -> None:
    pool = Pool(12)
    held = named(pool, [1, 2, 3, 4, 5, 6])
    pool.pin(held)
    pool.release((pool.split(held, 2),))
    assert (held.ids, held.refs, pool.free) == ([3], 2, 8)
    assert held.left is not None
    assert (held.left.ids, held.left.refs) == ([1, 2], 1)
    check_pool(pool, Counter([held, held, held.left]))


def test_letting_go_of_an_unnamed_front() -> None:
    pool = Pool(12)
    held = Extent(pool.take(4), 0)
    pool.release((pool.split(held, 3),))
    assert list(pool.line())[:4] == [3, 2, 1, 5]
    assert (held.ids, held.start, held.left) == ([4], 3, None)
    check_pool(pool, Counter([held]))


def test_copies_of_the_same_text_are_all_kept() -> None:
    """Nothing is de-duplicated; the first registered is found first, and each leaves by itself."""
    pool = Pool(8)
    text = [1, 2, 3, 4]
    first = named(pool, text)
    chain = TokenChain(text, 2, XXH3)
    second = Extent(pool.take(2), 0)
    assert pool.maps[0].enter(chain, second) == [second]
    assert ids_by_hash(pool, text) == [[1, 3], [2, 4]]
    pool.release([first])
    pool.release([second])
    assert list(pool.line()) == [5, 6, 7, 2, 1, 4, 3]
    pool.take(4)
    assert ids_by_hash(pool, text) == [[1, 3], [4]]
    pool.take(1)
    assert ids_by_hash(pool, text) == [[3], [4]]


# -- evict by id ------------------------------------------------------------------------------------------------------


def test_evicting_by_id_forgets_names_and_moves_nobody() -> None:
    pool = Pool(6)
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    extent = named(pool, text)
    pool.release([extent])
    line = list(pool.line())
    pool.evict([3, 3])
    assert ids_by_hash(pool, text) == [[1], [2], [], [4]]
    assert list(pool.line()) == line
    assert pool.free == 5
    check_pool(pool, Counter())
    assert pool.take(3) == [5, 4, 3]
    assert ids_by_hash(pool, text) == [[1], [2], [], []]
    check_pool(pool, Counter({Extent([5, 4, 3], 0): 1}))


def test_evicting_a_held_block_leaves_it_held() -> None:
    manager = BlockManager(10, [FULL])
    request = make(manager, "a", range(12))
    assert run(manager, request)
    before = snapshot(manager, request)
    manager.evict([2])
    after = snapshot(manager, request)
    assert after["requests"][0][1] == [[1, 2, 3]]
    assert sorted(block for _, _, block in after["cached"]) == [1, 3]
    assert (after["references"], after["line"]) == (before["references"], before["line"])
    assert manager.lookup(make(manager, "b", range(13))).tokens == 4
    manager.check_integrity()
    manager.free(request)
    assert list(manager.pool.line()) == [2, 4, 5, 6, 7, 8, 9, 3, 1], "without a name it is freed to the front"


def test_evicting_an_empty_block_is_not_announced() -> None:
    pool = Pool(6)
    version = pool.version
    pool.evict([0, 1, 5])
    pool.evict([])
    assert pool.version == version


@pytest.mark.parametrize("block", [-1, 6, 1000])
def test_evicting_outside_the_pool_is_refused_as_a_whole(block: int) -> None:
    pool = Pool(6)
    text = [1, 2]
    pool.release([named(pool, text)])
    with pytest.raises(ValueError, match=f"no block {block} in a pool of 6"):
        pool.evict([1, block])
    assert ids_by_hash(pool, text) == [[1]]


# -- reset ------------------------------------------------------------------------------------------------------------


def test_reset_is_refused_while_anything_is_held() -> None:
    manager = BlockManager(10, [FULL])
    cache(manager, "a", range(8))
    holder = make(manager, "b", range(100, 102))
    assert run(manager, holder)
    before = snapshot(manager, holder)
    assert manager.reset() is False
    assert snapshot(manager, holder) == before
    manager.free(holder)
    assert manager.reset() is True


def test_reset_forgets_all_and_keeps_the_line() -> None:
    manager = BlockManager(10, [FULL])
    cache(manager, "a", range(16))
    manager.evict([2])
    cache(manager, "b", [*range(8), *range(100, 108)])
    line = list(manager.pool.line())
    hit = manager.lookup(make(manager, "c", range(17)))
    assert hit.tokens
    assert manager.reset() is True
    assert list(manager.pool.line()) == line
    assert list(manager.pool.cached_blocks()) == []
    assert manager.pool.version > hit.version
    assert manager.lookup(make(manager, "c", range(17))).tokens == 0
    manager.check_integrity()
    request = make(manager, "d", range(36))
    assert run(manager, request)
    assert manager.block_ids(request) == [line]


# -- refusals and random use ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, -3])
def test_a_pool_needs_a_block(count: int) -> None:
    with pytest.raises(ConfigError, match=f"a pool needs at least the null block, got num_blocks={count}"):
        Pool(count)


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown eviction policy 'mru': did you mean lru\? Choose one of belady"):
        Pool(4, eviction="mru")


class Blocks:
    """Model of the pool, one block at a time: a queue, a count per block, and names."""

    def __init__(self, count: int) -> None:
        self.queue = list(range(1, count))
        self.names: dict[int, object] = {}

    def take(self, count: int) -> list[int]:
        taken, self.queue = self.queue[:count], self.queue[count:]
        for block in taken:
            self.names.pop(block, None)
        return taken

    def release(self, blocks: list[int]) -> None:
        self.queue = [b for b in blocks if b not in self.names] + self.queue + [b for b in blocks if b in self.names]


@pytest.mark.parametrize("seed", range(8))
def test_random_use_of_extents_equals_random_use_of_blocks(seed: int) -> None:
    """Extents of any length are taken, named, released, split, hit, cut short by eviction and forgotten by id."""
    rng = random.Random(seed)
    pool, blocks = Pool(40), Blocks(40)
    held: list[Extent] = []
    serial = 0
    for _ in range(600):
        roll = rng.random()
        if roll < 0.4 and pool.free:
            count = rng.randint(1, min(9, pool.free))
            ids = pool.take(count)
            assert ids == blocks.take(count)
            extent = Extent(ids.copy(), 0)
            held.append(extent)
            if rng.random() < 0.7:
                serial += 1
                chain = TokenChain([serial, *range(2 * count - 1)], 2, XXH3)
                pool.maps[0].enter(chain, extent)
                blocks.names.update(zip(ids, chain.hashes(0, count), strict=True))
        elif roll < 0.75 and held:
            extent = held.pop(rng.randrange(len(held)))
            blocks.release(extent.ids[::-1])
            pool.release([extent])
        elif roll < 0.9 and list(pool.order):
            extent = rng.choice(list(pool.order))
            if len(extent.ids) > 1:
                extent = rng.choice([extent, pool.split(extent, rng.randint(1, len(extent.ids) - 1))])
            if extent.cached:
                pool.pin(extent)
                held.append(extent)
                blocks.queue = [block for block in blocks.queue if block not in extent.ids]
        else:
            gone = rng.sample(range(1, 40), 2)
            if not any(block in extent.ids for extent in held for block in gone):
                pool.evict(gone)
                for block in gone:
                    blocks.names.pop(block, None)
        assert list(pool.line()) == blocks.queue
        assert {block: key for _, key, block in pool.cached_blocks()} == blocks.names
        check_pool(pool, Counter(held))
