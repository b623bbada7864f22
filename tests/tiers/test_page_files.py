"""Files behind HiCache's host memory, on a clock."""

from __future__ import annotations

import pytest

from kvyard.blocks import Request
from kvyard.blocks.table import BlockTable
from kvyard.clock import SECOND
from kvyard.hashing import TokenChain, algorithm
from kvyard.tiers.config import TierConfig
from kvyard.tiers.links import LaneConfig, LinkConfig
from kvyard.tiers.page_files import BATCH, PageFiles, Prefetch

XXH3 = algorithm("xxh3")
LANE = LaneConfig(bandwidth=SECOND, first_byte_ns=100)
LINK = LinkConfig(outward=LANE, inward=LANE)


def files(limit: int = 1000) -> PageFiles:
    """A byte a nanosecond, ten bytes a page."""
    return PageFiles(TierConfig(num_blocks=limit, link=LINK), 10)


def prefetch(pages: int, *, known: bool = False) -> Prefetch:
    request = Request("r", TokenChain(list(range(pages)), 1, XXH3))
    return Prefetch(request, request.chain.keys, 0, pages, known=known)


def test_a_query_takes_a_first_byte_and_finds_pages_up_to_the_first_missing() -> None:
    storage, wanted = files(), prefetch(10)
    storage.write(0, [wanted.keys[index] for index in (0, 1, 2, 5)], BlockTable())
    storage.query(1000, wanted)
    assert storage.next_end() == 140
    storage.advance(1099)
    assert not storage.answered
    storage.advance(1100)
    assert storage.answered == [wanted]
    assert wanted.found == 3


def test_reads_take_batches_and_end_with_the_first_missing_page() -> None:
    storage, wanted = files(), prefetch(3 * BATCH)
    storage.write(0, list(wanted.keys)[: BATCH + 1], BlockTable())
    storage.advance(10_000)
    wanted.found = 3 * BATCH
    storage.read(10_000, wanted)
    ends = []
    while (end := storage.next_end()) is not None:
        ends.append(end)
        storage.advance(end)
    assert [pages for _, pages in storage.progress] == [BATCH, BATCH + 1, BATCH + 1, -1]
    assert ends == [10_000 + 100 + 10 * BATCH, 10_000 + 2 * (100 + 10 * BATCH)]


def test_what_was_given_up_before_its_turn_takes_no_time() -> None:
    storage, wanted, later = files(), prefetch(10), prefetch(10)
    storage.query(0, wanted)
    wanted.end(0)
    storage.query(0, later)
    storage.advance(100)
    assert storage.answered == [wanted, later]


@pytest.mark.parametrize(("limit", "left"), [(10, 9), (3, 2)])
def test_files_beyond_the_limit_go_least_recently_used_first(limit: int, left: int) -> None:
    storage, wanted = files(limit), prefetch(limit + 1)
    storage.write(0, list(wanted.keys)[:limit], BlockTable())
    storage.write(0, [wanted.keys[0]], BlockTable())
    storage.write(0, [wanted.keys[limit]], BlockTable())
    storage.advance(1_000_000)
    assert len(storage.pages) == left
    assert wanted.keys[0] in storage.pages
    assert wanted.keys[1] not in storage.pages
