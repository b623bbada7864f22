"""Stores that wait for a parent or a text."""

from __future__ import annotations

from tests.index.support import Bench, hashes_of, removed, stored

from kvyard.events.types import Removed, Stored
from kvyard.index.waiting import WaitingStores

TEXT = list(range(1000, 1128))


def test_d8_orphans_wait_for_their_parents() -> None:
    bench = Bench()
    bench.say(stored(TEXT, 4, 4, 8))
    bench.say(stored(TEXT, 4, 2, 4))
    bench.say(removed(TEXT, 4, 7, 8))
    assert bench.blocks(TEXT) == 0
    bench.say(stored(TEXT, 4, 0, 2))
    assert bench.blocks(TEXT) == 7


def test_d8_orphans_are_bounded() -> None:
    bench = Bench(waiting=10)
    for start in range(20, 0, -2):
        bench.say(stored(TEXT, 4, start, start + 2))
    ((_, feed),) = bench.indexer.feeds()
    assert len(feed.waiting) <= 10
    assert feed.waiting.dropped == 10


def test_the_same_orphan_time_and_again_is_bounded_too() -> None:
    bench = Bench(waiting=10)
    for _ in range(20):
        bench.say(stored(TEXT, 4, 4, 6))
    ((_, feed),) = bench.indexer.feeds()
    assert len(feed.waiting) <= 10 and feed.waiting.dropped >= 30


def test_removals_of_a_hash_that_two_orphans_announced_are_about_both() -> None:
    """Two stores of one block wait for different parents and both are taken back; one parent comes. No copy is left."""
    bench = Bench()
    names = hashes_of(TEXT, 4)
    bench.say(stored(TEXT, 4, 2, 3))
    bench.say(Stored(hashes=[names[2]], parent=names[20], tokens=TEXT[8:12], block_size=4))
    bench.say(Removed(hashes=[names[2]]))
    bench.say(Removed(hashes=[names[2]]))
    bench.say(stored(TEXT, 4, 0, 2))
    assert bench.blocks(TEXT) == 2
    assert bench.indexer.dedup.outstanding == 0


def test_an_orphan_that_found_its_parent_leaves_the_other_to_its_removal() -> None:
    bench = Bench()
    names = hashes_of(TEXT, 4)
    bench.say(stored(TEXT, 4, 2, 3))
    bench.say(Stored(hashes=[names[2]], parent=names[20], tokens=TEXT[8:12], block_size=4))
    bench.say(stored(TEXT, 4, 0, 2))
    assert bench.blocks(TEXT) == 3
    bench.say(Removed(hashes=[names[2]]))
    bench.say(Removed(hashes=[names[2]]))
    assert bench.blocks(TEXT) == 2


def test_nothing_waits_once_all_is_cleared() -> None:
    waiting = WaitingStores(100)
    waiting.add_nameless(0, [7, 8])
    waiting.add_orphan(0, Stored(hashes=[1], parent=2, tokens=None, block_size=4))
    assert waiting
    waiting.clear_all()
    assert not waiting and len(waiting) == 0 and waiting.snapshot({}) == ([], [])
    assert list(waiting.named([7, 8])) == []
