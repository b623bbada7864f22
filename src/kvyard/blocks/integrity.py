"""The invariants of pool and manager, checked from scratch.

Slow on purpose: everything is counted again from the tables, the line of free blocks and the maps, and compared with
the working data structures. Tests call it after every step; production code may call it at any time.
"""

from collections import Counter
from collections.abc import Iterable

from kvyard.blocks.cache_map import CacheMap
from kvyard.blocks.extent import Extent
from kvyard.blocks.pool import Pool
from kvyard.blocks.radix import held_of, own_window_pages
from kvyard.blocks.request import Request


def check_manager(pool: Pool, requests: Iterable[Request]) -> None:
    """Raise ``AssertionError`` unless every reference is accounted for (I1) and every block is in one place (I2, I3)."""
    references: Counter[Extent] = Counter()
    own_windows = 0
    for request in requests:
        for table in request.tables:
            if pool.windows is not None:
                own_windows += own_window_pages(table)
            end = 0
            for extent in table:
                assert extent.ids, f"{request} lists an empty extent"
                assert extent.start >= end, f"{request} lists overlapping extents around position {extent.start}"
                end = extent.stop
                references[extent] += 1
            assert table.length >= end, f"{request}: the table is shorter than its blocks"
            listed = [block for block in table.ids() if block]
            assert len(listed) == len(set(listed)), f"a table lists a block twice: {listed}"
    windows = pool.windows
    if windows is not None:
        counted = windows.free + windows.evictable + windows.protected + own_windows
        assert counted == windows.size, f"I2: {counted} window pages are somewhere, of {windows.size}"
    states = pool.states
    if states is not None:
        held_by = [held_of(table) for request in requests for table in request.tables]
        own = sum(held.slots + held.writing for held in held_by)
        counted = states.free + states.evictable + states.protected + own
        assert counted == states.size, f"I2: {counted} state slots are somewhere, of {states.size}"
    references.update(pool.pinned)
    for held in pool.holds.tables:
        references.update(held)
    check_pool(pool, references)


def check_pool(pool: Pool, references: Counter[Extent]) -> None:
    """Raise ``AssertionError`` unless the pool agrees with ``references``, the counts by holders."""
    for extent, count in references.items():
        assert extent.refs == count, f"I1: {extent} is held {count} times"
    line = list(pool.line())
    assert len(line) == pool.free, f"I2: {len(line)} blocks are in line, {pool.free} are counted as free"
    held = [block for extent in references for block in extent.ids]
    assert len(held) + len(line) == pool.num_blocks - 1, (
        f"I2: {len(held)} held + {len(line)} free, of {pool.num_blocks}"
    )
    everywhere = Counter(held)
    everywhere.update(line)
    twice = [block for block, count in everywhere.items() if count > 1]
    assert not twice, f"I3: blocks {twice} are in two places"
    assert set(everywhere) == set(range(1, pool.num_blocks)), "I2: a block is missing or foreign"
    for extent in pool.order:
        assert not extent.refs, f"{extent} is held and in line"
        assert extent.ids, "an empty extent is in line"
    if pool.ledger is not None:
        pool.ledger.check([(extent.account, len(extent.ids)) for extent in (*references, *pool.order)])
    for cache_map in pool.maps:
        check_map(cache_map, references, set(pool.order))


def check_map(cache_map: CacheMap, references: Counter[Extent], line: set[Extent]) -> None:
    """Raise ``AssertionError`` unless the tree is a tree and its copies agree with it."""
    starts = cache_map.starts
    kids = Counter(node.parent for node in starts.values() if node.parent is not None)
    for key, node in starts.items():
        assert node.key == node.keys[node.start] == key, f"{node} is filed under another hash"
        assert node.start < node.stop, f"{node} is empty"
        assert node.kids == kids[node], f"{node} has {kids[node]} children"
        assert node.copies or node.kids, f"{node} is a hole with nothing behind it"
        parent = node.parent
        assert (parent is None) == (node.start == 0), f"{node} hangs in the air"
        if parent is not None:
            assert parent.stop == node.start, f"{node} doesn't follow {parent}"
            assert starts.get(parent.keys[parent.start]) is parent, f"the parent of {node} is gone"
        for extent in node.copies:
            assert extent.node is node, f"{extent} is listed as a copy of {node}"
            assert (extent.start, extent.stop) == (node.start, node.stop), f"{extent} doesn't cover {node}"
            assert extent in references or extent in line, f"{extent} is neither held nor in line"
    for key, holders in cache_map.marks.items():
        assert holders, "a mark that no block has"
        for extent in holders:
            runs = extent.marks.runs if extent.marks is not None else []
            assert any(run[0] == key for run in runs), f"{extent} is listed under a mark that it doesn't have"
            assert len(extent.ids) == 1, f"{extent} is marked and more than one block"
            assert extent in references or extent in line, f"{extent} is neither held nor in line"


def reference_counts(pool: Pool, requests: Iterable[Request]) -> dict[int, int]:
    """Return the reference count of each held block. Takes time by the number of held blocks."""
    held = [*pool.holds.tables, *(table for request in requests for table in request.tables)]
    extents = [*pool.pinned, *(extent for table in held for extent in table)]
    return {block: extent.refs for extent in extents for block in extent.ids}
