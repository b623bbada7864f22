"""The seed's tests (llm-d #680), at filter level and through the whole pipeline. Names say which of the seed's each is."""

from __future__ import annotations

import logging
import random

import pytest
from tests.index.naive import NaiveIndex
from tests.index.support import Bench, hashes_of, nameless, removed, stored

from kvyard.events.types import Cleared, Removed, Stored, Tier
from kvyard.index import DedupFilter, Holder, Indexer, Place, Places, Source, metrics

TEXT = list(range(100, 116))


class Counted:
    """A filter with rows to go with it, as it always has: a count is what the row says plus what the filter keeps."""

    def __init__(self, **options: object) -> None:
        self.filter = DedupFilter(**options)  # type: ignore[arg-type]
        self.rows = NaiveIndex()

    def store(self, place: int, keys: list[int]) -> None:
        for key in keys:
            self.filter.repeated(place, self.rows.store(place, [key]))
        self.filter.check_integrity()

    def remove(self, place: int, keys: list[int]) -> list[int]:
        forwarded = list(self.filter.removed(place, keys))
        self.rows.remove(place, forwarded)  # type: ignore[arg-type]
        self.filter.check_integrity()
        return forwarded  # type: ignore[return-value]

    def clear(self, place: int) -> None:
        self.rows.clear(place)
        self.filter.clear(place)


class TestFilter:
    def test_duplicate_store_suppresses_first_remove(self) -> None:
        both = Counted()
        both.store(0, [1, 2, 3])
        both.store(0, [1, 2, 3])
        assert both.remove(0, [1, 2, 3]) == []
        assert both.remove(0, [1, 2, 3]) == [1, 2, 3]
        assert both.filter.size == 0

    def test_places_are_independent(self) -> None:
        """Tier, group and rank independence: each is a place of its own."""
        both = Counted()
        both.store(0, [1])
        both.store(0, [1])
        both.store(1, [1])
        assert both.remove(1, [1]) == [1]
        assert both.remove(0, [1]) == []

    def test_unknown_remove_passes_through(self) -> None:
        both = Counted()
        assert both.remove(0, [7]) == [7]
        assert both.remove(0, [7]) == [7]
        both.store(0, [7])
        assert both.remove(0, [7]) == [7]

    def test_partial_forward_keeps_order_and_multiplicity(self) -> None:
        both = Counted()
        both.store(0, [1, 2])
        both.store(0, [1])
        assert both.remove(0, [1, 2, 3, 3]) == [2, 3, 3]

    def test_duplicates_inside_one_event_count_separately(self) -> None:
        both = Counted()
        both.store(0, [1, 1, 1])
        assert both.remove(0, [1, 1]) == []
        assert both.remove(0, [1]) == [1]

    def test_clear_resets_and_isolates(self) -> None:
        both = Counted()
        for place in (0, 1):
            both.store(place, [1])
            both.store(place, [1])
        both.clear(0)
        both.store(0, [1])
        assert both.remove(0, [1]) == [1]
        assert both.remove(1, [1]) == []

    def test_disabled_forwards_all(self) -> None:
        both = Counted(enabled=False)
        both.store(0, [1])
        both.store(0, [1])
        assert both.remove(0, [1]) == [1]

    def test_at_the_cap_the_first_remove_counts(self) -> None:
        both = Counted(cap=1)
        both.store(0, [1, 2])
        both.store(0, [1, 2])
        assert both.remove(0, [1, 2]) == [2]
        assert both.filter.counters.uncounted == 1

    def test_counts_are_those_of_the_wire(self) -> None:
        """I11: against plain counting."""
        rng = random.Random(11)
        both, counts = Counted(), {}
        for _ in range(3000):
            place, key = rng.randrange(3), rng.randrange(6)
            at = (place, key)
            if rng.random() < 0.5:
                both.store(place, [key])
                counts[at] = counts.get(at, 0) + 1
            else:
                expected = [] if counts.get(at, 0) > 1 else [key]
                assert both.remove(place, [key]) == expected
                counts[at] = max(0, counts.get(at, 0) - 1)
            assert both.filter.outstanding == sum(max(0, count - 1) for count in counts.values())


class TestPool:
    def test_duplicate_store_survives_first_remove(self) -> None:
        bench = Bench(remembered=0)
        bench.say(stored(TEXT, 4))
        bench.say(stored(TEXT, 4))
        bench.say(removed(TEXT, 4))
        assert bench.blocks(TEXT) == 4
        bench.say(removed(TEXT, 4))
        assert bench.blocks(TEXT) == 0
        ((_, feed),) = bench.indexer.feeds()
        assert len(feed.bridge) == 0

    def test_duplicate_cpu_offload_removal_survives_first_remove(self) -> None:
        bench = Bench()
        cpu = {"tier": Tier.G2}
        bench.say(stored(TEXT, 4))
        bench.say(nameless(TEXT, 4, **cpu), nameless(TEXT, 4, **cpu))
        bench.say(removed(TEXT, 4, **cpu))
        bench.say(removed(TEXT, 4))
        assert bench.by_tier(TEXT) == {"G2": 4}
        bench.say(stored(TEXT, 4), removed(TEXT, 4, **cpu))
        assert bench.by_tier(TEXT) == {"G1": 4}

    def test_two_streams_of_one_worker_aggregate(self) -> None:
        bench = Bench()
        bench.indexer.register(Source(stream="connector", worker="a"))
        bench.say(stored(TEXT, 4, tier=Tier.G2))
        bench.say(stored(TEXT, 4, tier=Tier.G2), stream="connector")
        bench.say(removed(TEXT, 4, tier=Tier.G2), stream="connector")
        assert bench.blocks(TEXT) == 4
        bench.say(removed(TEXT, 4, tier=Tier.G2))
        assert bench.blocks(TEXT) == 0

    def test_ranks_stay_apart(self) -> None:
        bench = Bench(by_rank=True)
        for rank in (0, 1):
            bench.say(stored(TEXT, 4), rank=rank)
        bench.say(removed(TEXT, 4), rank=1)
        assert bench.blocks(TEXT, rank=0) == 4
        assert bench.blocks(TEXT, rank=1) == 0

    def test_groups_stay_apart(self) -> None:
        bench = Bench()
        full = {"kind": "full_attention"}
        bench.say(stored(TEXT, 4, group=0, **full), stored(TEXT, 4, group=1, **full))
        bench.say(removed(TEXT, 4, group=1))
        assert bench.blocks(TEXT) == 0
        bench.say(stored(TEXT, 4, group=1, **full))
        assert bench.blocks(TEXT) == 4

    def test_tier_update_with_no_resolved_keys_is_not_counted(self) -> None:
        bench = Bench()
        bench.say(nameless(TEXT, 4, tier=Tier.G2), nameless(TEXT, 4, tier=Tier.G2))
        bench.say(removed(TEXT, 4, tier=Tier.G2), removed(TEXT, 4, tier=Tier.G2))
        assert bench.indexer.dedup.size == 0
        bench.say(stored(TEXT, 4, tier=Tier.G2))
        assert bench.blocks(TEXT) == 4
        bench.say(removed(TEXT, 4, tier=Tier.G2))
        assert bench.blocks(TEXT) == 0

    def test_only_resolved_hashes_are_counted(self) -> None:
        """The seed's residual issue (d): half of a tier update resolves."""
        bench = Bench()
        bench.say(stored(TEXT, 4, 0, 2))
        bench.say(nameless(TEXT, 4, tier=Tier.G2))
        assert bench.by_tier(TEXT) == {"G1": 2}
        bench.say(removed(TEXT, 4, 0, 2))
        assert bench.by_tier(TEXT) == {"G2": 2}

    def test_all_blocks_cleared_resets(self) -> None:
        bench = Bench()
        bench.say(stored(TEXT, 4), stored(TEXT, 4))
        bench.clear()
        bench.say(stored(TEXT, 4), removed(TEXT, 4))
        assert bench.blocks(TEXT) == 0

    def test_a_clear_is_pod_wide_unless_configured(self) -> None:
        for options, left in (({"clear_scope": "device"}, 4), ({"clear_scope": "all"}, 0), ({}, 0)):
            bench = Bench(**options)
            bench.say(stored(TEXT, 4), stored(TEXT, 4, tier=Tier.G2), stored(TEXT, 4, tier=Tier.G2))
            bench.clear()
            assert bench.blocks(TEXT) == left
            assert bench.indexer.dedup.outstanding == left

    def test_a_clear_that_names_a_tier_is_that_tiers(self) -> None:
        bench = Bench()
        bench.say(stored(TEXT, 4), stored(TEXT, 4, tier=Tier.G2))
        bench.clear(Tier.G2)
        assert bench.by_tier(TEXT) == {"G1": 4}

    def test_removing_a_stream_resets_in_lockstep(self) -> None:
        """The seed's residual issue (a), D13 and D14: rows, counts and specs go, and late events revive nothing."""
        bench = Bench()
        bench.say(stored(TEXT, 4), stored(TEXT, 4))
        bench.indexer.unregister("a")
        assert bench.indexer.dedup.outstanding == 0
        assert bench.indexer.backend.usage().blocks == 0
        bench.say(stored(TEXT, 4))
        assert bench.indexer.unknown_streams == 1
        assert bench.indexer.backend.usage().blocks == 0
        bench.indexer.register(Source(stream="a", worker="a"))
        bench.say(stored(TEXT, 4), removed(TEXT, 4), seq=0)
        assert bench.blocks(TEXT) == 0

    def test_metrics_count_block_hashes(self) -> None:
        bench = Bench()
        bench.say(stored(TEXT, 4), stored(TEXT, 4))
        assert _counts(bench.indexer)["outstanding_references"] == 4
        bench.say(removed(TEXT, 4), removed(TEXT, 4))
        assert _counts(bench.indexer) == {
            "removed_hashes_suppressed_total": 4,
            "removed_hashes_forwarded_total": 4,
            "outstanding_references": 0,
            "uncounted_hashes_total": 0,
        }

    def test_outstanding_references_are_counted_by_pod(self) -> None:
        bench = Bench(workers=("a", "b"))
        bench.say(stored(TEXT, 4), stored(TEXT, 4))
        bench.say(stored(TEXT, 4), stored(TEXT, 4), stored(TEXT, 4), stream="b")
        assert _by_pod(bench.indexer) == {"a": 4, "b": 8, "other": 0}

    def test_pods_beyond_the_limit_are_counted_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(metrics, "MOST_PODS", 1)
        bench = Bench(workers=("a", "b", "c"))
        for stream in "abc":
            bench.say(*[stored(TEXT, 4)] * (3 if stream == "b" else 2), stream=stream)
        assert _by_pod(bench.indexer) == {"b": 8, "other": 8}

    def test_disabled_it_degrades_to_the_old_behaviour(self) -> None:
        bench = Bench(dedup=DedupFilter(enabled=False))
        bench.say(stored(TEXT, 4), stored(TEXT, 4), removed(TEXT, 4))
        assert bench.blocks(TEXT) == 0

    def test_overlapping_chunks(self) -> None:
        """Two chunks list one block: the first remove keeps it, the second drops it."""
        bench = Bench()
        bench.say(stored(TEXT, 4))
        names = hashes_of(TEXT, 4)
        chunk = [names[0:3], names[2:4]]
        for hashes in chunk:
            bench.say(Stored(hashes=hashes, parent=None, tokens=None, block_size=0, tier=Tier.G2))
        bench.say(removed(TEXT, 4))
        assert bench.by_tier(TEXT) == {"G2": 4}
        bench.say(Removed(hashes=chunk[1], tier=Tier.G2))
        assert bench.by_tier(TEXT) == {"G2": 3}
        bench.say(Removed(hashes=chunk[0], tier=Tier.G2))
        assert bench.by_tier(TEXT) == {}

    def test_overlapping_chunks_with_tokens(self) -> None:
        """The same, self-describing, and with chunks of the engine's blocks that are smaller than ours."""
        for size in (2, 4, 8):
            bench = Bench(block_size=size)
            bench.say(stored(TEXT, 4, 0, 3, tier=Tier.G2), stored(TEXT, 4, 2, 4, tier=Tier.G2))
            assert bench.blocks(TEXT) == 16 // size
            bench.say(removed(TEXT, 4, 2, 4, tier=Tier.G2))
            assert bench.blocks(TEXT) == 12 // size
            bench.say(removed(TEXT, 4, 0, 3, tier=Tier.G2))
            assert bench.blocks(TEXT) == 0


def _counts(indexer: Indexer) -> dict[str, float]:
    """The filter's metrics, by what follows their common prefix."""
    prefix = "kvcache_kvevents_dedup_"
    totals: dict[str, float] = {}
    for name, _, value in metrics.collect(indexer):
        if name.startswith(prefix):
            totals[name.removeprefix(prefix)] = totals.get(name.removeprefix(prefix), 0) + value
    return totals


def _by_pod(indexer: Indexer) -> dict[str, float]:
    name = "kvcache_kvevents_dedup_outstanding_references"
    return {labels["pod"]: value for found, labels, value in metrics.collect(indexer) if found == name}


def test_a_line_is_logged_only_when_something_was_suppressed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kvyard.index.dedup")
    both = Counted()
    both.store(0, [1, 2])
    both.remove(0, [1])
    assert not caplog.records
    both.store(0, [2])
    both.remove(0, [2])
    assert len(caplog.records) == 1


def test_clears_do_not_reach_other_holders() -> None:
    bench = Bench(workers=("a", "b"))
    for stream in ("a", "b"):
        bench.say(stored(TEXT, 4), stored(TEXT, 4), stream=stream)
    bench.say(Cleared(), stream="a")
    assert (bench.blocks(TEXT, "a"), bench.blocks(TEXT, "b")) == (0, 4)
    bench.say(removed(TEXT, 4), stream="b")
    assert bench.blocks(TEXT, "b") == 4


def test_an_indexer_starts_empty() -> None:
    assert Indexer().matches([1, 2]) == {}
    assert Holder("a", 1) != Holder("a", 0)


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
def test_tier_group_rank_and_holder_independence(other: Place) -> None:
    """TierIndependence, GroupIndependence, DataParallelRankIndependence, ClearIsolatesPods, and GroupIdxOrNoGroup."""
    places, filter_ = Places(), DedupFilter()
    mine, theirs = places.number(Place(Holder("a"), Tier.G1, 0)), places.number(other)
    filter_.repeated(mine, [1])
    assert filter_.removed(theirs, [1]) == [1]
    filter_.clear(theirs)
    assert filter_.removed(mine, [1]) == []
    assert filter_.removed(mine, [1]) == [1]


def test_aggregates_across_sources() -> None:
    """The filter counts by place, whoever announces: the second removal goes on."""
    filter_ = DedupFilter()
    filter_.repeated(0, [1])  # the row is the first source's, this the second's
    assert filter_.removed(0, [1]) == []
    assert filter_.removed(0, [1]) == [1]


def test_a_restored_place_counts_as_the_first_did() -> None:
    filter_, other = DedupFilter(), DedupFilter()
    filter_.repeated(3, [7, 8, 7])
    other.restore(3, filter_.snapshot(3))
    assert other.snapshot(3) == filter_.snapshot(3) == [(7, 2), (8, 1)]
    assert list(other.removed(3, [7, 8, 9])) == [9]
    other.check_integrity()
