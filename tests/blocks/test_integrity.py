"""``check_integrity`` sees what it is there for: each way to break the books is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.blocks.support import FULL, cache, make, run

from kvyard.blocks import BlockManager, GroupSpec, Request
from kvyard.blocks.extent import Extent, Node


class Books:
    """A manager with something held, something shared, something cached and free, and a hole."""

    def __init__(self) -> None:
        self.manager = BlockManager(40, [FULL, GroupSpec(kind="sliding_window", window=6, block_size=4)])
        cache(self.manager, "gone", range(500, 512))
        self.first = make(self.manager, "first", range(24))
        assert run(self.manager, self.first, 12)
        assert run(self.manager, self.first)
        self.second = make(self.manager, "second", [*range(8), *range(100, 106)])
        assert run(self.manager, self.second)
        self.manager.evict([self.manager.block_ids(self.first)[0][3]])
        self.pool = self.manager.pool
        self.manager.check_integrity()

    def held(self, request: Request | None = None) -> Extent:
        return (request or self.first).tables[0].settle()[-1]

    def free(self) -> Extent:
        return next(iter(self.pool.order))

    def node(self, copies: bool = True) -> Node:
        return next(node for node in self.pool.maps[0].starts.values() if bool(node.copies) == copies)


def one_reference_too_many(books: Books) -> None:
    books.held().refs += 1


def one_reference_too_few(books: Books) -> None:
    shared = books.second.tables[0].settle()[0]
    assert shared.refs == 2
    shared.refs -= 1


def a_pin_that_nobody_counted(books: Books) -> None:
    books.pool.pinned[books.held()] += 1


def a_wrong_free_count(books: Books) -> None:
    books.pool.free += 1


def a_lost_block(books: Books) -> None:
    books.pool._fresh += 1


def a_block_that_is_held_and_free(books: Books) -> None:
    books.pool._fresh += 1
    books.pool._loose.append(books.held().ids[0])


def a_block_in_two_tables(books: Books) -> None:
    books.held(books.second).ids[-1] = books.held().ids[-1]


def a_block_twice_in_a_table(books: Books) -> None:
    extent = books.held()
    extent.ids[-1] = books.first.tables[0].settle()[0].ids[0]


def a_foreign_block(books: Books) -> None:
    books.pool._fresh += 1
    books.pool._loose.append(1000)


def a_held_extent_in_line(books: Books) -> None:
    books.free().refs = 1


def an_empty_extent_in_line(books: Books) -> None:
    books.pool.order.push(Extent([], 0, 0))


def overlapping_extents(books: Books) -> None:
    table = books.first.tables[0]
    table.settle()
    table.extents[-1].start -= 1
    table.starts[-1] -= 1


def a_table_shorter_than_its_blocks(books: Books) -> None:
    books.first.tables[0].length -= 1


def a_node_under_another_name(books: Books) -> None:
    starts = books.pool.maps[0].starts
    key, node = next(iter(starts.items()))
    del starts[key]
    starts[key + 1] = node  # type: ignore[operator]


def a_child_too_many(books: Books) -> None:
    books.node().kids += 1


def a_hole_for_nothing(books: Books) -> None:
    node = next(node for node in books.pool.maps[0].starts.values() if node.copies and not node.kids)
    for extent in node.copies:
        extent.node = None
    node.copies = []


def a_copy_that_is_too_short(books: Books) -> None:
    node = next(node for node in books.pool.maps[0].starts.values() if node.copies and node.stop - node.start > 1)
    node.copies[0].start += 1


def a_copy_of_something_else(books: Books) -> None:
    books.node().copies[0].node = None


def a_copy_that_is_nowhere(books: Books) -> None:
    node = books.node()
    ghost = Extent(list(node.copies[0].ids), node.start)
    ghost.node = node
    node.copies.append(ghost)


def marked() -> tuple[BlockManager, Extent]:
    """A manager in which a prompt ends inside a block, and that block."""
    groups = [GroupSpec(block_size=8), GroupSpec(kind="mamba", block_size=8)]
    manager = BlockManager(40, groups, hash_block_size=4)
    assert run(manager, make(manager, "a", range(13)))
    manager.check_integrity()
    ((extent,),) = manager.pool.maps[0].marks.values()
    return manager, extent


def test_marks_are_checked_too() -> None:
    manager, extent = marked()
    extent.marks = None
    with pytest.raises(AssertionError, match="is listed under a mark that it doesn't have"):
        manager.check_integrity()
    manager, extent = marked()
    next(iter(manager.pool.maps[0].marks.values())).clear()
    with pytest.raises(AssertionError, match="a mark that no block has"):
        manager.check_integrity()
    manager, extent = marked()
    ghost = Extent([extent.ids[0]], extent.start)
    ghost.marks = extent.marks
    next(iter(manager.pool.maps[0].marks.values())).append(ghost)
    with pytest.raises(AssertionError, match="is neither held nor in line"):
        manager.check_integrity()


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (one_reference_too_many, r"I1: Extent\(.*refs=2.*\) is held 1 times"),
        (one_reference_too_few, r"I1: Extent\(.*refs=1.*\) is held 2 times"),
        (a_pin_that_nobody_counted, r"I1: Extent\(.*refs=1.*\) is held 2 times"),
        (a_wrong_free_count, r"I2: \d+ blocks are in line, \d+ are counted as free"),
        (a_lost_block, r"I2: \d+ blocks are in line, \d+ are counted as free"),
        (a_block_that_is_held_and_free, r"I3: blocks \[\d+\] are in two places"),
        (a_block_in_two_tables, r"I3: blocks \[\d+\] are in two places"),
        (a_block_twice_in_a_table, r"a table lists a block twice"),
        (a_foreign_block, r"I2: a block is missing or foreign"),
        (a_held_extent_in_line, r"is held and in line"),
        (an_empty_extent_in_line, r"an empty extent is in line"),
        (overlapping_extents, r"lists overlapping extents around position \d+"),
        (a_table_shorter_than_its_blocks, r"the table is shorter than its blocks"),
        (a_node_under_another_name, r"is filed under another hash"),
        (a_child_too_many, r"has \d+ children"),
        (a_hole_for_nothing, r"is a hole with nothing behind it"),
        (a_copy_that_is_too_short, r"doesn't cover|shorter than its blocks|overlapping"),
        (a_copy_of_something_else, r"is listed as a copy of"),
        (a_copy_that_is_nowhere, r"is neither held nor in line"),
    ],
)
def test_broken_books_are_seen(corrupt: Callable[[Books], None], message: str) -> None:
    books = Books()
    corrupt(books)
    with pytest.raises(AssertionError, match=message):
        books.manager.check_integrity()
