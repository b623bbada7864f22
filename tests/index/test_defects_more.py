"""Defects of llm-d's index that show in how it is used rather than in what it stores, and the seed's tests of single rules.

D15 (bounded queues) is in ``tests/server/test_fleet.py``, where there is a queue.
"""

from __future__ import annotations

import logging

import pytest
from tests.index.support import Bench, hashes_of, nameless, removed, stored

from kvyard.events.types import Removed, Stored, Tier
from kvyard.index import DedupFilter, Holder, Place, Places

TEXT = list(range(100, 116))


class Shy(int):
    """A number that mustn't be made into text."""

    def __repr__(self) -> str:
        raise AssertionError("formatted")

    __str__ = __repr__
    __format__ = __repr__  # type: ignore[assignment]


def test_d11_nothing_is_formatted_on_the_hot_path(caplog: pytest.LogCaptureFixture) -> None:
    """Stores, repetitions, removals, orphans, lookups: with logging at its default no hash or token becomes text."""
    with caplog.at_level(logging.INFO):
        bench = Bench()
        names = [Shy(int.from_bytes(key[-8:], "big")) for key in hashes_of(TEXT, 4)]
        tokens = [Shy(token) for token in TEXT]
        for at in (2, 0, 0):
            parent = names[at - 1] if at else None
            bench.say(Stored(hashes=names[at:], parent=parent, tokens=tokens[4 * at :], block_size=4))
        bench.say(Stored(hashes=names, parent=None, tokens=None, block_size=0, tier=Tier.G2))
        bench.say(Removed(hashes=names), Removed(hashes=names[3:]), Removed(hashes=[Shy(7)]))
        assert bench.blocks(tokens) == 4
        assert bench.indexer.score(tokens).workers[Holder("a")].tokens == 12
        assert bench.indexer.dedup.counters.suppressed
    assert not caplog.records


def test_d16_asking_leaves_no_row_that_could_expire() -> None:
    """Rows come and go by events only: two requests with one prefix share nothing that the first to end could take away."""
    bench = Bench()
    bench.say(stored(TEXT, 4, 0, 2))
    before = bench.indexer.backend.usage()
    answers = [bench.indexer.score([*TEXT, 1], now=now).workers[Holder("a")] for now in (0, 10**9, 10**15)]
    assert [answer.tokens for answer in answers] == [8, 8, 8] and answers[-1].age == 10**15
    assert bench.indexer.backend.usage() == before


class TestSeed:
    @pytest.mark.parametrize(
        "other",
        [
            Place(Holder("a"), Tier.G2, 0),
            Place(Holder("a"), Tier.G1, 1),
            Place(Holder("a", 1), Tier.G1, 0),
            Place(Holder("b"), Tier.G1, 0),
            Place(Holder("a"), Tier.G1, None),
            Place(Holder("a", 0, True), Tier.G1, 0),
        ],
    )
    def test_tier_group_rank_and_holder_independence(self, other: Place) -> None:
        """TierIndependence, GroupIndependence, DataParallelRankIndependence, ClearIsolatesPods, and GroupIdxOrNoGroup."""
        places, filter_ = Places(), DedupFilter()
        mine, theirs = places.number(Place(Holder("a"), Tier.G1, 0)), places.number(other)
        filter_.repeated(mine, [1])
        assert filter_.removed(theirs, [1]) == [1]
        filter_.clear(theirs)
        assert filter_.removed(mine, [1]) == []
        assert filter_.removed(mine, [1]) == [1]

    def test_no_group_is_not_group_zero(self) -> None:
        """A removal that names no group doesn't take what group 0 announced."""
        bench = Bench()
        bench.say(stored(TEXT, 4, group=0, kind="full_attention"))
        bench.say(removed(TEXT, 4))
        assert bench.blocks(TEXT) == 4
        bench.say(removed(TEXT, 4, group=0))
        assert bench.blocks(TEXT) == 0

    def test_aggregates_across_sources(self) -> None:
        """The filter counts by place, whoever announces: the second removal goes on."""
        filter_ = DedupFilter()
        filter_.repeated(0, [1])  # the row is the first source's, this the second's
        assert filter_.removed(0, [1]) == []
        assert filter_.removed(0, [1]) == [1]

    def test_a_tier_update_of_half_known_hashes_counts_that_half(self) -> None:
        bench = Bench()
        bench.say(stored(TEXT, 4, 0, 2))
        for _ in range(2):
            bench.say(nameless(TEXT, 4, 0, 4, tier=Tier.G2))
        assert bench.indexer.dedup.outstanding == 2
