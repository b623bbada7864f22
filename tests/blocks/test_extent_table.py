"""Extents and tables: a split repairs nobody's table, a table notices when it next looks, and nothing dead is kept."""

from __future__ import annotations

import gc
import random

import pytest
from tests.blocks.content import Engine, Traffic, pool_for
from tests.blocks.support import FULL, WINDOW, cache, make, run

from kvyard.blocks import BlockManager, GroupSpec
from kvyard.blocks.extent import Extent, Node
from kvyard.blocks.integrity import reference_counts
from kvyard.blocks.table import BlockTable
from kvyard.hashing import TokenChain


def parts_of(last: Extent) -> list[tuple[int, list[int]]]:
    """The extent and everything to its left, in order of position."""
    parts = [last]
    while parts[-1].left is not None:
        parts.append(parts[-1].left)
    return [(part.start, part.ids) for part in reversed(parts)]


# -- extents ----------------------------------------------------------------------------------------------------------


def test_the_later_part_keeps_the_object() -> None:
    extent = Extent([7, 3, 9, 5], 10, refs=2, priority=60)
    extent.expires = 99
    front = extent.split_front(1)
    assert (front.start, front.ids, front.stop) == (10, [7], 11)
    assert (extent.start, extent.ids, extent.stop) == (11, [3, 9, 5], 14)
    assert (front.refs, front.priority, front.expires) == (2, 60, 99)
    assert extent.left is front
    assert front.right is extent
    middle = extent.split_front(2)
    assert parts_of(extent) == [(10, [7]), (11, [3, 9]), (13, [5])]
    assert (front.right, middle.left, middle.right) == (middle, front, extent)
    front.ids.append(1)
    assert middle.ids == [3, 9], "parts share no list"


def test_forgetting_neighbours_works_in_both_directions() -> None:
    extent = Extent([1, 2, 3], 0)
    first = extent.split_front(1)
    middle = extent.split_front(1)
    middle.forget_neighbours()
    assert (first.right, middle.left, middle.right, extent.left) == (None, None, None, None)


def test_names() -> None:
    extent = Extent([1, 2], 4)
    assert not extent.cached
    assert repr(extent) == "Extent(4..6, unnamed, refs=1, ids=[1, 2])"


# -- tables -----------------------------------------------------------------------------------------------------------


def test_positions_without_blocks_are_null() -> None:
    table = BlockTable()
    table.append(Extent([5, 6], 2))
    table.append(Extent([9], 5))
    assert table.ids() == [0, 0, 5, 6, 0, 9]
    table.length = 8
    assert table.ids() == [0, 0, 5, 6, 0, 9, 0, 0]
    assert BlockTable().ids() == []


def test_a_table_notices_splits_when_it_looks() -> None:
    shared = Extent([1, 2, 3, 4, 5], 0, refs=2)
    one, other = BlockTable(), BlockTable()
    one.append(shared)
    other.append(shared)
    shared.split_front(2)
    shared.split_front(2)
    assert one.extents == [shared], "nobody told it"
    assert one.ids() == [1, 2, 3, 4, 5]
    assert [extent.ids for extent in one] == [[1, 2], [3, 4], [5]]
    assert one.starts == [0, 2, 4]
    settled = one.settle()
    assert one.settle() is settled, "nothing to do the second time"
    assert other.extents == [shared], "the other still doesn't know"
    # Split what was split, at places of its own.
    one.extents[0].split_front(1)
    assert one.ids() == other.ids() == [1, 2, 3, 4, 5]
    assert [extent.start for extent in other] == [0, 1, 2, 4]


def test_a_table_that_was_given_the_later_part_only_does_not_claim_the_rest() -> None:
    shared = Extent([1, 2, 3, 4], 0, refs=1)
    shared.split_front(2)
    table = BlockTable()
    table.append(shared)
    shared.split_front(1)
    assert table.ids() == [0, 0, 3, 4]
    assert [extent.ids for extent in table] == [[3], [4]]


def test_losing_blocks_is_noticed() -> None:
    extent = Extent([1, 2, 3], 0)
    table = BlockTable()
    table.append(extent)
    extent.split_front(1).forget_neighbours()
    with pytest.raises(AssertionError, match=r"a table lost the blocks before Extent\(1\.\.3"):
        table.settle()


def test_only_private_unnamed_blocks_at_the_end_grow() -> None:
    table = BlockTable()
    table.add_blocks([4, 5])
    table.add_blocks([6])
    assert [extent.ids for extent in table] == [[4, 5, 6]]
    table.extents[0].refs = 2
    table.add_blocks([7])
    assert [extent.ids for extent in table] == [[4, 5, 6], [7]]
    table.length = 6
    table.add_blocks([8])
    assert [extent.ids for extent in table] == [[4, 5, 6], [7], [8]]
    assert table.ids() == [4, 5, 6, 7, 0, 0, 8]


def test_named_blocks_do_not_grow() -> None:
    manager = BlockManager(20, [FULL])
    request = make(manager, "a", range(8))
    assert run(manager, request)
    (extent,) = request.tables[0].extents
    assert extent.cached
    request.append([1])
    assert run(manager, request)
    assert [part.ids for part in request.tables[0]] == [[1, 2], [3]]
    assert [part.cached for part in request.tables[0]] == [True, False]


def test_dropping() -> None:
    table = BlockTable()
    first, second = Extent([1, 2, 3], 0), Extent([4, 5], 3)
    table.append(first)
    table.append(second)
    front = first.split_front(2)
    assert table.drop_before(2) == [front]
    assert table.ids() == [0, 0, 3, 4, 5]
    assert table.drop_before(2) == []
    assert table.drop_before(9) == [first, second]
    assert table.ids() == [0, 0, 0, 0, 0]


def test_replacing() -> None:
    table = BlockTable()
    for start in range(3):
        table.append(Extent([start + 1], start))
    table.replace(1, [])
    assert table.ids() == [1, 0, 3]
    table.replace(1, [Extent([8], 1), Extent([9], 2)])
    assert table.ids() == [1, 8, 9]
    assert table.starts == [0, 1, 2]


# -- through the manager ----------------------------------------------------------------------------------------------


def test_sharing_part_of_a_running_request_leaves_its_table_alone() -> None:
    manager = BlockManager(30, [FULL])
    first = make(manager, "a", range(40))
    assert run(manager, first)
    (whole,) = first.tables[0].extents
    second = make(manager, "b", [*range(16), 99])
    assert run(manager, second)
    assert first.tables[0].extents == [whole], "not settled before somebody asks"
    assert manager.block_ids(first) == [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
    assert manager.block_ids(second) == [[1, 2, 3, 4, 11]]
    third = make(manager, "c", [*range(8), 98])
    assert run(manager, third)
    assert [extent.refs for extent in first.tables[0]] == [3, 2, 1]
    assert reference_counts(manager.pool, manager.requests.values()) == {
        1: 3, 2: 3, 3: 2, 4: 2, 5: 1, 6: 1, 7: 1, 8: 1, 9: 1, 10: 1, 11: 1, 12: 1
    }  # fmt: skip
    for request in (second, first, third):
        manager.free(request)
        manager.check_integrity()
    assert list(manager.pool.line())[-10:] == [10, 9, 8, 7, 6, 5, 4, 3, 2, 1]


def test_a_growing_request_keeps_its_chain_in_one_piece() -> None:
    """The common case costs one extent and one node per request, however long it gets."""
    manager = BlockManager(100, [FULL])
    request = make(manager, "a", range(9))
    assert run(manager, request)
    for token in range(200):
        request.append([token])
        assert run(manager, request)
    assert len(request.tables[0].extents) <= 2
    assert len(list(manager.pool.maps[0].nodes())) == 1
    manager.check_integrity()


def alive(*kinds: type) -> dict[type, int]:
    """How many objects of each kind there are."""
    gc.collect()
    counts = dict.fromkeys(kinds, 0)
    for thing in gc.get_objects():
        if type(thing) in counts:
            counts[type(thing)] += 1
    return counts


@pytest.mark.usefixtures("only_new_objects")
@pytest.mark.parametrize(
    "groups",
    [
        [FULL],
        pytest.param([FULL, GroupSpec(kind="sliding_window", window=10, block_size=4)], marks=pytest.mark.slow),
        [FULL, WINDOW],
    ],
    ids=["full", "full+window", "full+wide"],
)
def test_evicted_extents_are_released(groups: list[GroupSpec]) -> None:
    """Splits link extents to each other; a chain of dead ones must not pile up behind those that live on."""
    before = alive(Extent, Node, TokenChain)
    engine = Engine(pool_for(groups), groups)
    traffic = Traffic(engine, 5)
    peak = dict.fromkeys(before, 0)
    for round_ in range(7):
        traffic.run(120)
        for name in list(engine.waiting):
            del engine.waiting[name]
        traffic.hits.clear()  # what was looked up is none of the manager's
        if round_ >= 2:
            for kind, count in alive(Extent, Node, TokenChain).items():
                peak[kind] = max(peak[kind], count - before[kind])
    # A block is in one extent at most, an extent in one node; holes can't outnumber what is behind them by much.
    blocks = engine.manager.pool.num_blocks
    assert peak[Extent] <= blocks + 10
    assert peak[Node] <= 2 * blocks
    assert peak[TokenChain] <= 2 * blocks


@pytest.mark.usefixtures("only_new_objects")
def test_a_hot_prefix_does_not_remember_those_who_used_it() -> None:
    """The first blocks stay for ever, what follows them is evicted thousands of times over."""
    manager = BlockManager(30, [FULL])
    rng = random.Random(1)
    hot = list(range(40))
    cache(manager, "first", hot)
    before = alive(Extent, Node, TokenChain)
    for serial in range(300):
        cut = rng.randint(8, 40)
        cache(manager, f"r{serial}", [*hot[:cut], *(rng.randint(100, 999) for _ in range(rng.randint(4, 40)))])
    manager.check_integrity()
    after = alive(Extent, Node, TokenChain)
    assert manager.lookup(make(manager, "last", hot)).tokens >= 8
    assert all(after[kind] - before[kind] < 30 for kind in before), (before, after)
