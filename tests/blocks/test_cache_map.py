"""The map of cached copies: a tree of stretches that answers like a dictionary of blocks, and stays small."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from tests.blocks.support import XXH3

from kvyard.blocks import Pool
from kvyard.blocks.cache_map import CacheMap
from kvyard.blocks.extent import Extent, Node
from kvyard.blocks.integrity import check_pool
from kvyard.events import Batcher, GroupMeta, Mirror, Tier
from kvyard.hashing import Key, TokenChain


def chain_of(tokens: list[int]) -> TokenChain:
    """One token a block."""
    return TokenChain(tokens, 1, XXH3)


def text(count: int, *changes: tuple[int, int]) -> list[int]:
    """0, 1, 2, … with some tokens changed."""
    tokens = list(range(count))
    for at, token in changes:
        tokens[at] = token
    return tokens


def enter(pool: Pool, chain: TokenChain, start: int, stop: int) -> Extent:
    extent = Extent(pool.take(stop - start), start)
    pool.maps[0].enter(chain, extent)
    return extent


def spans(cache_map: CacheMap, chain: TokenChain) -> list[tuple[int, int, int]]:
    """Return a walk's nodes: (start, stop, copies) of each, holes included, as far as the chain agrees."""
    nodes, covered = cache_map.walk(chain.keys, len(chain.keys))
    return [(node.start, min(node.stop, covered), len(node.copies)) for node in nodes]


def found(cache_map: CacheMap, chain: TokenChain) -> list[int]:
    """The block that a lookup would return for each position, 0 where nothing is cached."""
    nodes, covered = cache_map.walk(chain.keys, len(chain.keys))
    ids = [0] * len(chain.keys)
    for node in nodes:
        if node.copies:
            stop = min(node.stop, covered)
            ids[node.start : stop] = node.copies[0].ids[: stop - node.start]
    return ids


def nodes_of(cache_map: CacheMap) -> list[Node]:
    return list(cache_map.starts.values())


# -- walking ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts_at", range(1, 12))
def test_chains_that_part_inside_a_node(parts_at: int) -> None:
    pool = Pool(40)
    enter(pool, chain_of(text(11)), 0, 11)
    changed = [(parts_at, 99)] if parts_at < 11 else []
    other = chain_of(text(max(12, parts_at + 1), *changed))
    assert spans(pool.maps[0], other) == [(0, parts_at, 1)]
    assert spans(pool.maps[0], chain_of([99, *text(11)[1:]])) == []


def test_a_walk_is_limited() -> None:
    pool = Pool(40)
    chain = chain_of(text(10))
    enter(pool, chain, 0, 10)
    for limit in (0, 1, 5, 10):
        nodes, covered = pool.maps[0].walk(chain.keys, limit)
        assert (len(nodes), covered) == (min(limit, 1), limit)


def test_a_walk_goes_through_holes_or_not() -> None:
    pool = Pool(40)
    chain = chain_of(text(10))
    enter(pool, chain, 0, 3)
    enter(pool, chain, 6, 8)
    assert spans(pool.maps[0], chain) == [(0, 3, 1), (3, 6, 0), (6, 8, 1)]
    nodes, covered = pool.maps[0].walk(chain.keys, 10, through_holes=False)
    assert ([node.stop for node in nodes], covered) == ([3], 3)
    nodes, covered = pool.maps[0].walk(chain.keys, 10, index=3)
    assert ([node.start for node in nodes], covered) == ([3, 6], 8)


# -- entering and leaving ---------------------------------------------------------------------------------------------


def test_a_copy_is_split_as_the_nodes_are() -> None:
    pool = Pool(60)
    cache_map = pool.maps[0]
    chain = chain_of(text(10))
    first, second = enter(pool, chain, 0, 4), enter(pool, chain, 6, 8)
    third = Extent(pool.take(9), 1)
    parts = cache_map.enter(chain_of(text(12)), third)
    assert [(part.start, part.stop) for part in parts] == [(1, 4), (4, 6), (6, 8), (8, 10)]
    assert parts[-1] is third
    assert spans(cache_map, chain) == [(0, 1, 1), (1, 4, 2), (4, 6, 1), (6, 8, 2), (8, 10, 1)]
    assert found(cache_map, chain) == [*first.left.ids, *first.ids, *parts[1].ids, *second.ids, *third.ids]  # type: ignore[union-attr]
    check_pool(pool, Counter([first.left, first, second, *parts]))


def test_text_that_parts_makes_a_fork() -> None:
    pool = Pool(60)
    cache_map = pool.maps[0]
    one, other = chain_of(text(8)), chain_of(text(8, (5, 50)))
    enter(pool, one, 0, 8)
    extent = Extent(pool.take(3), 5)
    cache_map.enter(other, extent)
    assert spans(cache_map, one) == [(0, 5, 1), (5, 8, 1)]
    assert spans(cache_map, other) == [(0, 5, 1), (5, 8, 1)]
    (root,) = [node for node in nodes_of(cache_map) if node.start == 0]
    assert root.kids == 2
    cache_map.leave(extent)
    assert spans(cache_map, other) == [(0, 5, 1)]
    assert root.kids == 1


def test_extending_in_place_is_for_sole_owners() -> None:
    pool = Pool(60)
    cache_map = pool.maps[0]
    chain = chain_of(text(6))
    last = enter(pool, chain, 0, 4)
    assert not cache_map.extend(last, [50], chain_of(text(6))), "another request's chain"
    last.refs = 2
    assert not cache_map.extend(last, [50], chain), "shared"
    last.refs = 1
    copy = enter(pool, chain, 0, 4)
    assert not cache_map.extend(last, [50], chain), "one of two copies"
    cache_map.leave(copy)
    assert cache_map.extend(last, [50], chain)
    assert (last.ids[-1], last.stop) == (50, 5)
    enter(pool, chain, 5, 6)
    assert not cache_map.extend(last, [51], chain), "somebody has continued it"
    assert not cache_map.extend(Extent([52], 0), [51], chain), "unnamed"
    assert last.stop == 5


def test_nothing_is_left_of_what_left() -> None:
    pool = Pool(60)
    cache_map = pool.maps[0]
    chain = chain_of(text(20))
    extents = [enter(pool, chain, start, start + 2) for start in (0, 4, 8, 16)]
    for extent in extents:
        cache_map.leave(extent)
    assert cache_map.starts == {}


# -- staying small ----------------------------------------------------------------------------------------------------


def test_a_window_that_moves_along_a_chain_leaves_one_hole() -> None:
    pool = Pool(300)
    cache_map = pool.maps[0]
    chain = chain_of(text(200))
    window: list[Extent] = []
    for position in range(200):
        window.append(enter(pool, chain, position, position + 1))
        if len(window) > 3:
            cache_map.leave(window.pop(0))
        assert len(cache_map.starts) <= 5
    assert spans(cache_map, chain) == [(0, 197, 0), (197, 198, 1), (198, 199, 1), (199, 200, 1)]


def test_a_tail_that_is_evicted_block_by_block_grows_one_hole() -> None:
    """What follows is held, so the hole must stay; it takes in one block after another."""
    pool = Pool(120)
    cache_map = pool.maps[0]
    chain = chain_of(text(101))
    body, held = enter(pool, chain, 0, 100), enter(pool, chain, 100, 101)
    pool.take(pool.free)
    pool.release([body])
    for left in range(99, 0, -1):
        assert pool.take(1)
        assert spans(cache_map, chain) == [(0, left, 1), (left, 100, 0), (100, 101, 1)]
        assert len(cache_map.starts) == 3
    assert pool.take(1)
    assert found(cache_map, chain) == [0] * 100 + held.ids
    assert len(cache_map.starts) <= 3
    cache_map.leave(held)
    assert cache_map.starts == {}


@pytest.mark.parametrize("step", [1, 16, 48])
def test_a_long_prompt_evicted_from_its_end_names_every_block_that_leaves(step: int) -> None:
    batcher = Batcher([GroupMeta(block_size=1)])
    pool = Pool(401, sink=batcher)
    chain = chain_of(text(400))
    extent = enter(pool, chain, 0, 400)
    pool.maps[0].detach(pool.maps[0].starts[chain.keys[0]], chain)
    pool.release([extent])
    mirror = Mirror()
    for left in range(400 - step, -1, -step):
        pool.take(step)
        batch = batcher.end_iteration(0)
        assert batch is not None
        mirror.apply(batch.events)
        batcher.check_announced(pool.snapshot())
        assert mirror.held.get((0, Tier.G1), set()) == set(chain.keys[:left])


def test_taking_a_hundred_blocks_one_by_one_makes_no_nodes() -> None:
    """Without anything behind it a stretch is just cut shorter."""
    pool = Pool(101)
    chain = chain_of(text(100))
    extent = enter(pool, chain, 0, 100)
    pool.release([extent])
    for left in range(99, 0, -1):
        pool.take(1)
        assert spans(pool.maps[0], chain) == [(0, left, 1)]


# -- like a dictionary ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_random_use_equals_a_dictionary(seed: int) -> None:
    """Chains with much in common, entered from anywhere to anywhere, hit in part, evicted in part, forgotten by id."""
    rng = random.Random(seed)
    pool = Pool(50)
    cache_map = pool.maps[0]
    named: dict[Key, list[int]] = {}
    """Hash -> blocks, first registered first."""
    held: list[Extent] = []
    alphabet = [[rng.randint(0, 1) for _ in range(16)] for _ in range(6)]
    for _ in range(500):
        roll = rng.random()
        if roll < 0.45 and pool.free > 8:
            tokens = [
                *rng.choice(alphabet)[: rng.randint(1, 16)],
                *(rng.randint(0, 1) for _ in range(rng.randint(0, 4))),
            ]
            chain = chain_of(tokens)
            start = rng.choice([0, rng.randrange(len(tokens))])
            stop = rng.randint(start + 1, min(len(tokens), start + 8))
            ids = pool.take(stop - start)
            for blocks in named.values():
                blocks[:] = [block for block in blocks if block not in ids]
            extent = Extent(ids.copy(), start)
            held += cache_map.enter(chain, extent)
            for key, block in zip(chain.hashes(start, stop), ids, strict=True):
                named.setdefault(key, []).append(block)
        elif roll < 0.8 and held:
            pool.release([held.pop(rng.randrange(len(held)))])
        elif roll < 0.92:
            gone = rng.sample(range(1, 50), 2)
            pool.evict(gone)
            for blocks in named.values():
                blocks[:] = [block for block in blocks if block not in gone]
            # What was forgotten stays held, now in parts of its own.
        elif held:
            extent = rng.choice(held)
            if len(extent.ids) > 1:
                pool.split(extent, rng.randint(1, len(extent.ids) - 1))
        held = settled(held)
        now: dict[Key, list[int]] = {}
        for _, key, block in pool.cached_blocks():
            now.setdefault(key, []).append(block)
        assert now == {key: blocks for key, blocks in named.items() if blocks}
        check_pool(pool, Counter(held))
        probe = chain_of(rng.choice(alphabet))
        first = [named.get(key, []) for key in probe.hashes(0, 16)]
        assert found(cache_map, probe) == [blocks[0] if blocks else 0 for blocks in first]


def settled(held: list[Extent]) -> list[Extent]:
    """Return the held extents, with the parts that were split off."""
    parts: list[Extent] = []
    for extent in held:
        at: Extent | None = extent
        while at is not None:
            if at.refs and at not in parts:
                parts.append(at)
            at = at.left
    return parts
