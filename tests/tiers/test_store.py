"""A tier's store: pending and resident, room for all or nothing, and what counts as use."""

from __future__ import annotations

from typing import Any

import pytest
from tests.blocks.support import XXH3

from kvyard.blocks.spec import ConfigError
from kvyard.events import Batcher, Mirror
from kvyard.events.types import GroupMeta, Removed, Stored, Tier
from kvyard.hashing import TokenChain
from kvyard.tiers.store import PageRange, TierStore


def chain(text: int, length: int = 10, common: int = 0) -> TokenChain:
    """``common`` blocks that all chains share, then blocks of its own."""
    return TokenChain([0] * (4 * common) + [text] * (4 * (length - common)), 4, XXH3)


def store_of(pages: int, **options: Any) -> TierStore:
    return TierStore(Tier.G2, pages, 1, **options)


def put(store: TierStore, text: TokenChain, start: int, stop: int, priority: int | None = None) -> bool:
    """Store a piece, from reservation to landing."""
    pieces = [PageRange(0, text, start, stop)]
    tables = store.reserve(pieces)
    for piece, held in zip(pieces, tables or (), strict=False):
        if priority is not None:
            [extent] = held
            extent.priority = priority
        store.land(piece, held)
    store.check_integrity()
    return tables is not None


def here(store: TierStore, text: TokenChain) -> list[tuple[int, int]]:
    return list(store.resident(0, text.keys, len(text.keys)))


def test_pending_blocks_are_neither_found_nor_missing() -> None:
    store, text = store_of(20), chain(1)
    piece = PageRange(0, text, 2, 6)
    (held,) = store.reserve([piece]) or ()
    assert here(store, text) == []
    assert list(store.on_the_way(0, text.keys, 10)) == [(2, 6)]
    assert store.missing(0, text.keys, 0, 10) == [(0, 2), (6, 10)]
    # Another text that shares a part of what is on the way finds that part.
    assert store.missing(0, chain(2, common=0).keys, 0, 10) == [(0, 10)]
    store.check_integrity()
    store.land(piece, held)
    assert here(store, text) == [(2, 6)] and not store.on_the_way(0, text.keys, 10)
    assert store.missing(0, text.keys, 0, 10) == [(0, 2), (6, 10)]
    store.check_integrity()


def test_a_text_that_parts_inside_what_is_pending() -> None:
    store, one, two = store_of(20), chain(1, common=5), chain(2, common=5)
    assert store.reserve([PageRange(0, one, 3, 8)])
    assert list(store.on_the_way(0, two.keys, 10)) == [(3, 5)]
    assert store.missing(0, two.keys, 0, 10) == [(0, 3), (5, 10)]


def test_the_least_recently_used_goes_first_and_its_tail_before_its_head() -> None:
    store = store_of(12)
    one, two, three = chain(1), chain(2), chain(3)
    assert put(store, one, 0, 5) and put(store, two, 0, 5)
    assert put(store, three, 0, 4)
    assert (here(store, one), here(store, two)) == ([(0, 3)], [(0, 5)])
    assert store.evicted == 2 and store.used == 12


def test_asking_changes_no_recency_but_a_match_does() -> None:
    for match in (False, True):
        store = store_of(10)
        one, two = chain(1), chain(2)
        assert put(store, one, 0, 5) and put(store, two, 0, 5)
        for _ in range(3):
            store.resident(0, one.keys, 10)
            store.missing(0, one.keys, 0, 10)
        if match:
            store.touch(0, one, 3)
        assert put(store, chain(3), 0, 5)
        # Matched: only the first three blocks were used, and the rest of the text is older than the other's.
        assert here(store, one) == ([(0, 3)] if match else [])
        assert here(store, two) == ([(0, 2)] if match else [(0, 5)])


def test_room_for_all_or_for_nothing() -> None:
    store = store_of(10)
    one = chain(1)
    assert put(store, one, 0, 6)
    kept = store.hold(PageRange(0, one, 0, 6))
    before = here(store, one), store.pool.free
    assert store.reserve([PageRange(0, chain(2), 0, 5)]) is None
    assert (here(store, one), store.pool.free) == before and not store.on_the_way(0, chain(2).keys, 10)
    assert put(store, chain(2), 0, 4)
    store.pool.holds.end(kept)
    assert put(store, chain(3), 0, 5)
    store.check_integrity()


def test_a_cohort_does_not_evict_its_own_prefix() -> None:
    store = store_of(10)
    one, two = chain(1, 14), chain(2)
    assert put(store, one, 0, 6) and put(store, two, 0, 4)
    assert not put(store, one, 6, 13)  # seven more: only the other text's four may go
    assert (here(store, one), here(store, two)) == ([(0, 6)], [(0, 4)])
    assert put(store, one, 6, 10)
    assert (here(store, one), here(store, two)) == ([(0, 10)], [])


def test_a_cohort_does_not_evict_its_own_prefix_of_low_priority() -> None:
    store = store_of(10, eviction="priority")
    one, two = chain(1, 14), chain(2)
    assert put(store, one, 0, 6, priority=5) and put(store, two, 0, 4, priority=90)
    assert not put(store, one, 6, 13)
    assert (here(store, one), here(store, two)) == ([(0, 6)], [(0, 4)])
    assert put(store, one, 6, 10)
    assert (here(store, one), here(store, two)) == ([(0, 10)], [])
    assert put(store, two, 0, 4, priority=90), "what has a low priority still goes first for others"
    assert (here(store, one), here(store, two)) == ([(0, 2), (6, 10)], [(0, 4)])


def test_held_extents_can_be_split_by_others_and_are_released_whole() -> None:
    store = store_of(20)
    one = chain(1, common=6)
    assert put(store, one, 0, 10)
    held = store.hold(PageRange(0, one, 2, 9))
    assert put(store, chain(2, common=6), 6, 10)  # splits the stretch at six
    assert [len(extent.ids) for extent in held] == [4, 3]
    store.check_integrity()
    store.pool.holds.end(held)
    assert store.pool.free == 20
    store.check_integrity()


def test_only_what_is_here_can_be_held() -> None:
    store = store_of(20)
    one = chain(1)
    assert put(store, one, 0, 3) and put(store, one, 5, 8)
    for low, high in ((0, 4), (4, 6), (6, 9)):
        with pytest.raises(LookupError, match="G2 has"):
            store.hold(PageRange(0, one, low, high))
    store.check_integrity()


def test_a_store_without_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one page"):
        store_of(0)


def test_events_carry_the_tier_and_mirror_the_map() -> None:
    batcher = Batcher([GroupMeta(block_size=4)])
    store = store_of(6, sink=batcher)
    mirror = Mirror()
    one = chain(1)
    pieces = [PageRange(0, one, 0, 4)]
    tables = store.reserve(pieces)
    assert tables is not None and batcher.end_iteration(0) is None  # nothing yet
    store.land(pieces[0], tables[0])
    put(store, chain(2), 0, 4)
    batch = batcher.end_iteration(0)
    assert batch is not None
    mirror.apply(batch.events)
    kinds = [(type(event), event.tier, len(event.hashes)) for event in batch.events if not hasattr(event, "x")]  # type: ignore[union-attr]
    assert kinds == [(Stored, Tier.G2, 4), (Removed, Tier.G2, 2), (Stored, Tier.G2, 4)]
    assert mirror.held == {(0, Tier.G2): {key for _, key, _ in store.pool.cached_blocks()}}
    assert isinstance(batch.events[0], Stored) and list(batch.events[0].tokens or ()) == [1] * 16
