"""In which order cached blocks are given up: vLLM's for ``lru``, TensorRT-LLM's retention priority for ``priority``."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from tests.blocks.support import FULL, XXH3, cache, make, run
from tests.engine.driving import Row, drive

from kvyard.blocks import BlockManager, ConfigError, GroupSpec, Hints, Request, Retention
from kvyard.blocks.eviction import ORDERS, EvictionOrder, make_order
from kvyard.blocks.eviction.lru import LruOrder
from kvyard.blocks.eviction.priority import PriorityOrder
from kvyard.blocks.extent import DEFAULT_PRIORITY, Extent
from kvyard.clock import SECOND
from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.hashing import TokenChain, TraceChain
from kvyard.tiers import OffloadConfig, TierConfig
from kvyard.tiers.links import LaneConfig, LinkConfig


class Now:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.time = 0

    def __call__(self) -> int:
        return self.time


def order_of(order: EvictionOrder) -> list[list[int]]:
    return [extent.ids for extent in order]


def waiting(order: EvictionOrder, *ids: int, priority: int = DEFAULT_PRIORITY, expires: int | None = None) -> Extent:
    """An extent of these blocks that nobody holds."""
    extent = Extent(list(ids), 0, refs=0, priority=priority)
    extent.expires = expires
    order.push(extent)
    return extent


# -- every order ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[name for name in ORDERS.ours if name != "s3-fifo"])  # there, what was hit has its place
def order(request: pytest.FixtureRequest) -> EvictionOrder:
    return make_order(request.param, lambda: 0)


def test_first_in_first_out_among_equals(order: EvictionOrder) -> None:
    first, second, third = (waiting(order, block) for block in (1, 2, 3))
    assert order.head() is first
    assert order_of(order) == [[1], [2], [3]]
    order.remove(second)
    assert order_of(order) == [[1], [3]]
    order.remove(first)
    assert order.head() is third
    order.push(first)
    assert order_of(order) == [[3], [1]]


def test_an_order_can_run_empty_and_go_on(order: EvictionOrder) -> None:
    with pytest.raises(IndexError, match="no extent is left to evict"):
        order.head()
    extent = waiting(order, 1)
    order.remove(extent)
    assert order_of(order) == []
    with pytest.raises(IndexError, match="no extent is left to evict"):
        order.head()
    order.push(extent)
    assert order.head() is extent


def test_the_split_off_part_is_evicted_right_after(order: EvictionOrder) -> None:
    """The later part of a chain is given up before the earlier."""
    extent = waiting(order, 1, 2, 3)
    waiting(order, 4)
    order.insert_after(extent, extent.split_front(2))
    assert order_of(order) == [[3], [1, 2], [4]]
    order.remove(extent)
    assert order_of(order) == [[1, 2], [4]]


def test_unknown_orders_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown eviction policy 'arc': choose one of belady, hits-per-token, lfu, lru"
    ):
        make_order("arc", lambda: 0)


class Newest(LruOrder):
    """An order from outside: evicts what was freed last."""

    def head(self) -> Extent:
        return list(super().__iter__())[-1]

    def __iter__(self) -> Iterator[Extent]:
        return reversed(list(super().__iter__()))


@pytest.fixture
def newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ORDERS, "_loaded", {})  # what a test registers is gone afterwards
    ORDERS.register("newest", Newest)


@pytest.mark.usefixtures("newest")
def test_an_order_of_your_own_serves_the_host_tier_too() -> None:
    lane = LaneConfig(bandwidth=20_000_000_000)
    host = TierConfig(num_blocks=64, link=LinkConfig(outward=lane, inward=lane), eviction="newest")
    config = EngineConfig(
        groups=(GroupSpec(block_size=16),),
        num_gpu_blocks=40,
        eviction="newest",
        tiers=OffloadConfig(tiers=(host,)),
        bytes_per_block=1 << 16,
    )
    core = make_core(config)
    drive(core, [Row(at * SECOND, 512, 1, (at,)) for at in range(6)])
    assert core.offload is not None
    held = [
        at for at in range(6) if core.offload.tiers[0].store.resident(0, TraceChain((at,), 512, 512, 16, 0).keys, 32)
    ]
    assert held == [0, 5], "the first is kept for ever, and the last took the place of the one before"


@pytest.mark.usefixtures("newest")
def test_an_order_of_your_own_can_be_registered() -> None:
    manager = BlockManager(5, [FULL], eviction="newest")
    cache(manager, "a", range(8))
    cache(manager, "b", range(100, 108))
    assert list(manager.pool.line()) == [4, 3, 2, 1]
    assert cache(manager, "c", range(200, 204)) == [[4]]
    assert manager.lookup(make(manager, "d", range(9))).tokens == 8
    assert manager.lookup(make(manager, "e", range(100, 109))).tokens == 4
    manager.check_integrity()


# -- least recently used ----------------------------------------------------------------------------------------------


def test_the_worked_example() -> None:
    """11 blocks of 16 tokens: A has 55 tokens, B shares 48 of them. The lines are vLLM's."""
    manager = BlockManager(11, [GroupSpec(block_size=16)])
    first = make(manager, "a", range(55))
    assert run(manager, first)
    assert manager.block_ids(first) == [[1, 2, 3, 4]]
    second = make(manager, "b", [*range(48), 900, 901])
    assert run(manager, second)
    assert manager.block_ids(second) == [[1, 2, 3, 5]]
    manager.free(first)
    assert list(manager.pool.line()) == [4, 6, 7, 8, 9, 10]
    manager.free(second)
    assert list(manager.pool.line()) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]


def test_a_chain_loses_its_tail_first_and_the_oldest_chain_first() -> None:
    manager = BlockManager(7, [FULL])
    cache(manager, "a", range(12))
    cache(manager, "b", range(100, 112))
    assert list(manager.pool.line()) == [3, 2, 1, 6, 5, 4]
    expected = [(12, 12), (8, 12), (4, 12), (0, 12), (0, 8), (0, 4), (0, 0)]
    for step, (first, second) in enumerate(expected):
        assert manager.lookup(make(manager, "x", range(13))).tokens == first
        assert manager.lookup(make(manager, "y", range(100, 113))).tokens == second
        if step < 6:
            assert manager.pool.take(1)


def test_groups_go_one_after_another() -> None:
    manager = BlockManager(9, [FULL, FULL])
    cache(manager, "a", range(8))
    assert list(manager.pool.line()) == [5, 6, 7, 8, 2, 1, 4, 3]


def test_a_hit_counts_as_use_from_when_it_ends() -> None:
    manager = BlockManager(7, [FULL])
    cache(manager, "a", range(8))
    cache(manager, "b", range(100, 108))
    cache(manager, "c", range(200, 208))
    assert list(manager.pool.line()) == [2, 1, 4, 3, 6, 5]
    cache(manager, "d", [*range(8), 9])
    # For its last token D took B's last block, and gave it back without a name. A's blocks moved to the back.
    assert list(manager.pool.line()) == [4, 3, 6, 5, 2, 1]


# -- retention priority -----------------------------------------------------------------------------------------------


def test_the_lowest_priority_goes_first() -> None:
    order = PriorityOrder(Now())
    for block, priority in ((1, 80), (2, DEFAULT_PRIORITY), (3, 0), (4, 100), (5, 0), (6, 34)):
        waiting(order, block, priority=priority)
    assert order_of(order) == [[3], [5], [6], [2], [1], [4]]
    evicted = []
    while list(order):
        evicted.append(order.head().ids)
        order.remove(order.head())
    assert evicted == [[3], [5], [6], [2], [1], [4]]


def test_expired_blocks_rank_by_their_last_use() -> None:
    now = Now()
    order = PriorityOrder(now)
    waiting(order, 1)
    waiting(order, 2, priority=90, expires=100)
    now.time = 50
    waiting(order, 3)
    waiting(order, 4, priority=60)
    now.time = 99
    assert order_of(order) == [[1], [3], [4], [2]]
    now.time = 100
    assert order_of(order) == [[1], [2], [3], [4]]
    waiting(order, 5)
    assert order_of(order) == [[1], [2], [3], [5], [4]]
    order.remove(order.head())
    assert order.head().ids == [2]


def test_tensorrt_llm_makes_what_expires_the_newest() -> None:
    now = Now()
    order = PriorityOrder(now, {"expired_as_newest": 1})
    waiting(order, 1, priority=90, expires=30)
    waiting(order, 2, priority=70, expires=20)
    waiting(order, 3)
    now.time = 1000
    assert order_of(order) == [[3], [2], [1]]
    waiting(order, 4)
    assert order_of(order) == [[3], [2], [1], [4]]


def test_a_lowered_priority_expires_as_well() -> None:
    now = Now()
    order = PriorityOrder(now)
    waiting(order, 1)
    waiting(order, 2, priority=5, expires=10)
    assert order.head().ids == [2]
    now.time = 10
    assert order.head().ids == [1]


def test_the_clock_starts_when_the_extent_becomes_free() -> None:
    """And starts anew when it has been used again: an old deadline must not strike."""
    now = Now()
    order = PriorityOrder(now)
    extent = waiting(order, 1, priority=90, expires=100)
    waiting(order, 2, priority=50)
    now.time = 60
    order.remove(extent)
    now.time = 90
    order.push(extent)
    now.time = 150
    assert order_of(order) == [[2], [1]]
    now.time = 190
    assert order_of(order) == [[1], [2]]


def test_nothing_expires_while_it_is_held() -> None:
    now = Now()
    order = PriorityOrder(now)
    extent = waiting(order, 1, priority=90, expires=100)
    order.remove(extent)
    now.time = 500
    assert order_of(order) == []
    assert extent.priority == 90
    order.push(extent)
    assert extent.priority == 90


def test_parts_expire_with_the_whole() -> None:
    """Splitting an extent buys its parts no time."""
    now = Now()
    order = PriorityOrder(now)
    extent = waiting(order, 1, 2, 3, priority=90, expires=100)
    waiting(order, 9, priority=60)
    now.time = 80
    order.insert_after(extent, extent.split_front(1))
    assert order_of(order) == [[9], [2, 3], [1]]
    now.time = 100
    assert order_of(order) == [[2, 3], [1], [9]]
    order.insert_after(extent, extent.split_front(1))
    assert order_of(order) == [[3], [2], [1], [9]]


# -- wishes of requests -----------------------------------------------------------------------------------------------


def prioritised(blocks: int, now: Now | None = None, **options: Any) -> BlockManager:
    return BlockManager(blocks, [FULL], eviction="priority", now=now or Now(), **options)


def test_blocks_without_a_retention_have_the_default_priority() -> None:
    """Below a raised one, above a lowered one."""
    manager = prioritised(8)
    cache(manager, "low", range(8), hints=Hints(retention=(Retention(0, None, DEFAULT_PRIORITY - 1),)))
    cache(manager, "plain", range(100, 108))
    cache(manager, "high", range(200, 208), hints=Hints(retention=(Retention(0, None, DEFAULT_PRIORITY + 1),)))
    assert list(manager.pool.line()) == [7, 2, 1, 4, 3, 6, 5]
    manager = prioritised(8)
    cache(manager, "high", range(8), hints=Hints(retention=(Retention(0, None, DEFAULT_PRIORITY + 1),)))
    cache(manager, "plain", range(100, 108))
    cache(manager, "low", range(200, 208), hints=Hints(retention=(Retention(0, None, DEFAULT_PRIORITY - 1),)))
    assert list(manager.pool.line()) == [7, 6, 5, 4, 3, 2, 1]


def test_ranges_of_tokens() -> None:
    """A block has the priority of its first token; of several wishes the last one counts."""
    manager = prioritised(8)
    wishes = [Retention(0, 8, 80), Retention(10, 20, 10), Retention(16, 20, 90)]
    request = make(manager, "a", range(28), hints=Hints(retention=tuple(wishes)))
    assert run(manager, request)
    priorities = [extent.priority for extent in request.tables[0] for _ in extent.ids]
    assert priorities == [80, 80, DEFAULT_PRIORITY, 10, 90, DEFAULT_PRIORITY, DEFAULT_PRIORITY]
    manager.check_integrity()
    manager.free(request)
    assert list(manager.pool.line()) == [4, 7, 6, 3, 2, 1, 5]
    manager.check_integrity()


def test_a_retention_without_end_covers_generated_tokens() -> None:
    manager = prioritised(20)
    request = make(manager, "a", range(10), hints=Hints(retention=(Retention(8, None, 70),)))
    assert run(manager, request)
    for token in range(10):
        request.append([token])
        assert run(manager, request)
    priorities = {extent.start: extent.priority for extent in request.tables[0] if extent.cached}
    assert priorities[0] == DEFAULT_PRIORITY
    assert {priority for start, priority in priorities.items() if start >= 2} == {70}
    manager.check_integrity()


def test_a_retention_that_expires() -> None:
    now = Now()
    manager = prioritised(7, now)
    cache(manager, "a", range(8), hints=Hints(retention=(Retention(0, None, 90, duration=1000),)))
    now.time = 10
    cache(manager, "b", range(100, 108))
    assert list(manager.pool.line()) == [5, 6, 4, 3, 2, 1]
    # Used again at 500, so that it lasts until 1500.
    now.time = 500
    cache(manager, "c", [*range(8), 7])
    now.time = 1499
    assert list(manager.pool.line())[-2:] == [2, 1]
    cache(manager, "d", range(300, 304))
    assert list(manager.pool.line())[-3:] == [5, 2, 1]
    now.time = 1500
    assert list(manager.pool.line())[-3:] == [2, 1, 5], "used before d, and ordinary again"


def test_a_kept_prefix_outlives_a_flood() -> None:
    """What the wish is for: a system prompt survives traffic that is many times the pool."""
    rng = random.Random(0)
    system = list(range(16))
    survivors = {}
    for eviction in ("lru", "priority"):
        manager = BlockManager(12, [FULL], eviction=eviction)
        wishes = [Retention(0, 16, 80)] if eviction == "priority" else []
        cache(manager, "system", [*system, 1], hints=Hints(retention=tuple(wishes)))
        for serial in range(40):
            cache(manager, f"r{serial}", [rng.randint(1000, 9999) for _ in range(24)])
        survivors[eviction] = manager.lookup(make(manager, "again", [*system, 2])).tokens
        manager.check_integrity()
    assert survivors == {"lru": 0, "priority": 16}


def test_random_priorities_against_a_list() -> None:
    """The order as a list that is sorted anew each time it is asked for."""
    rng = random.Random(3)
    now = Now()
    order = PriorityOrder(now)
    blocks: list[tuple[int, int, int]] = []
    """Each free block with its priority and when that ends, by last use."""
    never = 1 << 60
    extents: dict[int, Extent] = {}
    """By block."""
    size = 3
    for step in range(3000):
        now.time += rng.randint(0, 3)
        blocks = [(block, p, end) if end > now.time else (block, DEFAULT_PRIORITY, never) for block, p, end in blocks]
        drawn = rng.random()
        if drawn < 0.3:
            priority, expires = rng.choice([10, 35, 35, 60, 90]), rng.choice([None, 5, 20, 60])
            ids = list(range(step * size, (step + 1) * size))
            extents |= dict.fromkeys(ids, waiting(order, *ids, priority=priority, expires=expires))
            end = now.time + expires if expires is not None and priority != DEFAULT_PRIORITY else never
            blocks += [(block, priority, end) for block in reversed(ids)]
        elif blocks and drawn < 0.6:
            extent = extents[rng.choice(blocks)[0]]
            if len(extent.ids) > 1:
                front = extent.split_front(rng.randrange(1, len(extent.ids)))
                extents |= dict.fromkeys(front.ids, front)
                order.insert_after(extent, front)
        elif blocks:
            extent = rng.choice([order.head(), extents[rng.choice(blocks)[0]]])
            order.remove(extent)
            blocks = [item for item in blocks if item[0] not in extent.ids]
        line = [block for extent in order for block in reversed(extent.ids)]
        assert line == [item[0] for item in sorted(blocks, key=lambda item: item[1])], f"step {step}"
        assert not blocks or order.head().ids[-1] == line[0]


def test_memory_of_deadlines_follows_the_candidates():
    manager = BlockManager(100, eviction="priority", now=lambda: 0)
    for number in range(2000):
        request = Request(
            f"r{number}", TokenChain(range(33), 16, XXH3), hints=Hints(retention=(Retention(0, None, 80, 10),))
        )
        hit = manager.lookup(request)
        assert manager.allocate(request, 33 - hit.tokens, hit) is not None
        manager.free(request)
    assert len(manager.pool.order._deadlines) < 200


# -- states -----------------------------------------------------------------------------------------------------------


def keep_state(manager: BlockManager, name: str, tokens: range) -> None:
    """Compute a prompt up to its last full block, so that there is a state to keep, and then the rest."""
    request = make(manager, name, tokens)
    hit = manager.lookup(request)
    whole = (len(tokens) - 1) // 4 * 4
    manager.begin_step()
    assert manager.allocate(request, whole - hit.tokens, hit) is not None
    request.num_computed_tokens, request.running = whole, True
    assert run(manager, request)
    manager.free(request)


def states_left(eviction: str, seconds: int, **options: float) -> tuple[int, int]:
    """A long prompt, ``seconds`` later a short one, then a flood: which of the two is found afterwards, in tokens."""
    now = Now()
    manager = BlockManager(
        41,
        [GroupSpec(kind="mamba", block_size=4)],
        eviction=eviction,
        eviction_options=options,
        now=now,
        retention_interval=0,
    )
    keep_state(manager, "long", range(101))
    now.time += seconds * SECOND
    keep_state(manager, "short", range(1000, 1009))
    now.time += 10 * SECOND
    for serial in range(38):  # a state each, and one block more while a prompt is computed
        keep_state(manager, f"f{serial}", range(2000 + 100 * serial, 2000 + 100 * serial + 5))
    manager.check_integrity()
    return (
        manager.lookup(make(manager, "x", range(102))).tokens,
        manager.lookup(make(manager, "y", range(1000, 1010))).tokens,
    )


def test_a_state_that_saves_more_stays_longer() -> None:
    assert states_left("lru", 10) == (0, 8)
    assert states_left("marconi", 10, full_credit=100, window_s=60) == (100, 0)
    assert states_left("marconi", 120, full_credit=100, window_s=60) == (0, 8), "but not for ever"
    assert states_left("marconi", 10, full_credit=100, window_s=60, alpha=0) == (0, 8), "LRU"


def test_a_states_saving_counts_from_the_state_before_it() -> None:
    now = Now()
    manager = BlockManager(
        40,
        [GroupSpec(kind="mamba", block_size=4)],
        eviction="marconi",
        eviction_options={"full_credit": 400, "attention_tokens": 50},
        now=now,
        retention_interval=0,
    )
    keep_state(manager, "a", range(41))
    keep_state(manager, "b", range(61))
    worths = {extent.start: extent.history.worth for extent in manager.pool.order if extent.history is not None}
    assert worths[9] == pytest.approx(40 * (1 + 20 / 50) / 400)
    assert worths[14] == pytest.approx(20 * (1 + 50 / 50) / 400)
