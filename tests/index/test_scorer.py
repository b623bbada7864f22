"""Scores: tiers, hybrid groups, pools, what isn't known, and words for all of it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.index.support import Bench, hashes_of, nameless, removed, stored

from kvyard.blocks import GroupSpec
from kvyard.errors import KvyardError
from kvyard.events.transport import Origin, State
from kvyard.events.types import Cleared, Stored, Tier
from kvyard.index import Holder, Indexer, Source, Trust
from kvyard.index.metrics import NAMES, collect

TEXT = list(range(200, 240))
A = Holder("a")
FULL: dict[str, Any] = {"kind": "full_attention"}
WINDOW: dict[str, Any] = {"kind": "sliding_window", "window": 8}


class TestTiers:
    def test_each_tier_goes_on_where_the_closer_ones_end(self) -> None:
        """llm-d's reference cases: three blocks, the third on the host only, scores 2.5; one and one at 0.8 scores 1.8."""
        bench = Bench(weights={Tier.G1: 1.0, Tier.G2: 0.5})
        bench.say(stored(TEXT, 4, 0, 3), stored(TEXT, 4, 2, 3, tier=Tier.G2), stored(TEXT, 4, 5, 6))
        assert bench.indexer.score(TEXT).workers[A].score == 3.0
        bench.say(removed(TEXT, 4, 2, 3))
        match = bench.indexer.score(TEXT).workers[A]
        assert match.score == 2.5
        assert {tier: found.reach for tier, found in match.tiers.items()} == {Tier.G1: 8, Tier.G2: 12}
        bench = Bench(weights={Tier.G1: 1.0, Tier.G2: 0.8})
        bench.say(stored(TEXT, 4, 0, 1), stored(TEXT, 4, 1, 2, tier=Tier.G2))
        assert bench.indexer.score(TEXT).workers[A].score == pytest.approx(1.8)

    def test_a_hole_ends_it_and_late_joiners_never_start(self) -> None:
        bench = Bench(workers=("a", "b"))
        bench.say(stored(TEXT, 4), removed(TEXT, 4, 3, 4))
        bench.say(stored(TEXT, 4), removed(TEXT, 4, 0, 1), stream="b")
        assert bench.indexer.matches(bench.indexer.identity.keys(TEXT)) == {A: 3}

    def test_the_last_token_is_always_computed(self) -> None:
        bench = Bench()
        bench.say(stored(TEXT, 4))
        assert bench.indexer.score(TEXT).workers[A].tokens == 36
        assert bench.indexer.score_keys(bench.indexer.identity.keys(TEXT)).workers[A].tokens == 40

    def test_the_best_is_the_first_by_name_among_equals(self) -> None:
        bench = Bench(workers=("b", "a"))
        assert bench.indexer.score(TEXT).best() is None
        for stream in ("b", "a"):
            bench.say(stored(TEXT, 4), stream=stream)
        best = bench.indexer.score(TEXT).best()
        assert best is not None and best.worker == A
        assert set(bench.indexer.score(TEXT, workers=[Holder("b")]).workers) == {Holder("b")}


class TestHybrid:
    def test_a_window_limits_where_it_has_a_hole(self) -> None:
        bench = Bench()
        bench.say(stored(TEXT, 4, group=0, **FULL), stored(TEXT, 4, group=1, **WINDOW))
        bench.say(removed(TEXT, 4, 6, 10, group=1))
        match = bench.indexer.score(TEXT).workers[A]
        assert (match.tokens, match.limited_by) == (24, 1)
        bench.say(removed(TEXT, 4, 0, 4, group=1))
        assert bench.indexer.score(TEXT).workers[A].tokens == 24

    def test_sparse_stores_are_resolved_by_hash_in_either_order(self) -> None:
        """vLLM lists only the blocks it kept, with all tokens: which ones is found through the full group."""
        names = hashes_of(TEXT, 4)
        sparse = Stored(hashes=[names[7], names[8]], parent=None, tokens=TEXT, block_size=4, group=1, **WINDOW)
        for events in ([stored(TEXT, 4, group=0, **FULL), sparse], [sparse, stored(TEXT, 4, group=0, **FULL)]):
            bench = Bench()
            bench.say(*events)
            assert bench.indexer.score(TEXT).workers[A].tokens == 36
            assert bench.indexer.dedup.size == 0

    def test_unresolved_groups_earn_nothing(self) -> None:
        bench = Bench()
        sparse = Stored(hashes=[123, 456], parent=None, tokens=TEXT, block_size=4, group=1, **WINDOW)
        bench.say(stored(TEXT, 4, group=0, **FULL), sparse)
        match = bench.indexer.score(TEXT).workers[A]
        assert (match.tokens, match.limited_by) == (0, 1)

    def test_a_removal_undoes_what_waits(self) -> None:
        bench = Bench()
        names = hashes_of(TEXT, 4)
        sparse = Stored(hashes=names[7:9], parent=None, tokens=TEXT, block_size=4, group=1, **WINDOW)
        bench.say(sparse, removed(TEXT, 4, 7, 9, group=1), stored(TEXT, 4, group=0, **FULL))
        assert bench.indexer.score(TEXT).workers[A].tokens == 0

    def test_an_empty_store_still_says_that_there_is_a_group(self) -> None:
        bench = Bench()
        bench.say(
            stored(TEXT, 4, group=0, **FULL),
            Stored(hashes=[], parent=None, tokens=TEXT, block_size=4, group=1, kind="mamba"),
        )
        assert bench.indexer.score(TEXT).workers[A].tokens == 0

    @pytest.mark.parametrize(
        ("fields", "why"),
        [
            ({"group": 1, "kind": "full_attention"}, "not all groups before it"),
            ({"group": 0, "kind": "quantum_attention"}, "kind that isn't known"),
            ({"group": 0}, "kind that isn't known"),
            ({"group": 0, "kind": "sliding_window"}, "kind that isn't known"),
            ({"group": 0, "kind": "chunked_local_attention"}, "kind that isn't known"),
        ],
    )
    def test_unknown_specs_fail_closed(self, fields: dict[str, Any], why: str) -> None:
        bench = Bench()
        bench.say(stored(TEXT, 4, **fields))
        match = bench.indexer.score(TEXT).workers[A]
        assert match.score == 0 and why in match.reason
        assert bench.blocks(TEXT) == 0

    def test_configured_groups_win(self) -> None:
        bench = Bench(groups=(GroupSpec(block_size=4, eagle=True),))
        bench.say(stored(TEXT, 4))
        assert bench.indexer.score_keys(bench.indexer.identity.keys(TEXT)).workers[A].tokens == 36

    def test_groups_of_other_block_sizes_than_ours(self) -> None:
        groups = (GroupSpec(block_size=4), GroupSpec(kind="sliding_window", window=8, block_size=8))
        for size in (1, 2, 4, 8):
            bench = Bench(block_size=size, groups=groups)
            bench.say(stored(TEXT, 4, group=0), stored(TEXT, 8, group=1))
            # The same hash names the same text in both groups here: the engine's hash unit is 4.
            names = hashes_of(TEXT, 4)
            wide = Stored(hashes=names[1::2], parent=None, tokens=None, block_size=8, group=1)
            bench.say(wide)
            assert bench.indexer.score(TEXT).workers[A].tokens == 32


class TestPools:
    def bench(self) -> Bench:
        bench = Bench(workers=("a", "b"))
        bench.indexer.register(Source(stream="disk", pool="disk"))
        bench.indexer.share("disk", [A, Holder("b")])
        for stream in ("a", "b"):
            bench.say(stored(TEXT, 4, 0, 1), stream=stream)
        return bench

    def test_copies_are_credited_to_each_member(self) -> None:
        bench = self.bench()
        bench.say(stored(TEXT, 4, tier=Tier.G3), stream="disk")
        for worker in "ab":
            assert bench.by_tier(TEXT, worker) == {"G1": 1, "G3": 9}
        bench.say(seq=0, origin=Origin.STATE, state=State.STALE, reason="gone", stream="disk")
        assert bench.by_tier(TEXT) == {"G1": 1}

    def test_a_pool_of_one_workers_group_counts_for_that_group_only(self) -> None:
        bench = Bench()
        bench.indexer.register(Source(stream="disk", pool="disk"))
        bench.indexer.share("disk", [A])
        bench.say(stored(TEXT, 4, 0, 1, group=0, **FULL), stored(TEXT, 4, 0, 1, group=1, **WINDOW))
        bench.say(stored(TEXT, 4, group=0, tier=Tier.G3, **FULL), stream="disk")
        assert bench.blocks(TEXT) == 1
        bench.say(stored(TEXT, 4, group=1, tier=Tier.G3, **WINDOW), stream="disk")
        assert bench.blocks(TEXT) == 10

    def test_a_pool_has_no_pools(self) -> None:
        with pytest.raises(KvyardError, match="pool"):
            self.bench().indexer.share("disk", [Holder("disk", 0, True)])


class TestTrust:
    def test_catching_up_may_be_worth_something(self) -> None:
        bench = Bench(trust=Trust(catching_up=0.5))
        bench.say(stored(TEXT, 4))
        bench.say(seq=0, origin=Origin.STATE, state=State.CATCHING_UP, reason="batch 1 is missing")
        match = bench.indexer.score_keys(bench.indexer.identity.keys(TEXT)).workers[A]
        assert (match.confidence, match.score, match.blocks) == (0.5, 5.0, 10)
        bench.say(seq=0, origin=Origin.STATE, state=State.STALE, reason="it is gone")
        assert bench.indexer.score(TEXT).workers[A].score == 0

    def test_a_stream_without_events_earns_no_trust(self) -> None:
        bench = Bench()
        match = bench.indexer.score(TEXT).workers[A]
        assert (match.state, match.confidence, match.score) == (State.STALE, 0.0, 0.0)


class TestExplain:
    def test_the_end_of_a_match_is_explained(self) -> None:
        bench = Bench(workers=("a", "b"))
        bench.say(stored(TEXT, 4, 0, 3))
        bench.say(stored(TEXT, 4, 0, 5), stream="b")
        assert "block 3 is on b@0" in bench.indexer.explain(TEXT, A).summary
        assert "no worker holds block 5" in bench.indexer.explain(TEXT, Holder("b")).summary
        assert "don't fill one block" in bench.indexer.explain(TEXT[:3], A).summary
        assert "isn't registered" in bench.indexer.explain(TEXT, Holder("c")).summary
        bench.say(seq=0, origin=Origin.STATE, state=State.STALE, reason="the cable")
        assert "earns nothing: the cable" in bench.indexer.explain(TEXT, A).summary

    def test_a_hole_of_one_group_is_named(self) -> None:
        bench = Bench()
        bench.say(stored(TEXT, 4, group=0, **FULL), stored(TEXT, 4, 0, 2, group=1, **FULL))
        found = bench.indexer.explain(TEXT, A)
        assert [group.tokens for group in found.groups] == [36, 8]
        assert "another group" in found.groups[1].why


def test_metrics_are_complete() -> None:
    """The collector brings every name that is promised, each sample once."""
    bench = Bench()
    bench.say(stored(TEXT, 4), stored(TEXT, 4), removed(TEXT, 4), nameless([1, 2, 3, 4], 4, tier=Tier.G2))
    samples = collect(bench.indexer)
    assert {name for name, _, _ in samples} == set(NAMES)
    assert len({(name, *sorted(labels.items())) for name, labels, _ in samples}) == len(samples)
    found = {name: value for name, _, value in samples}
    assert found["kvyard_index_feed_waiting_blocks"] == 1
    assert found["kvyard_index_blocks"] == 10


def test_clearing_an_unheard_stream_is_harmless() -> None:
    indexer = Indexer()
    indexer.register(Source(stream="a", worker="a"))
    indexer.unregister("a")
    indexer.unregister("a")
    bench = Bench()
    bench.say(Cleared())
    assert bench.blocks(TEXT) == 0


def test_workers_come_and_go_without_leaving_anything() -> None:
    bench = Bench(workers=("stays",))
    bench.say(stored(TEXT, 4), stream="stays")
    for number in range(20):
        name = f"w{number}"
        bench.indexer.register(Source(stream=name, worker=name))
        bench.say(stored(TEXT, 4, tier=Tier.G2), stored(TEXT, 4, 0, 2), stream=name)
        assert bench.by_tier(TEXT, name) == {"G1": 2, "G2": 8}
        bench.indexer.unregister(name)
        assert Holder(name) not in bench.indexer.score(TEXT).workers
    assert len(bench.indexer.places) == 3
    assert bench.blocks(TEXT, "stays") == 10


def test_d7_a_tier_without_a_weight_earns_nothing() -> None:
    bench = Bench(weights={Tier.G1: 1.0, Tier.G2: 0.5})
    bench.say(stored(TEXT, 4, 0, 2), stored(TEXT, 4, 2, 3, tier=Tier.G2), stored(TEXT, 4, 3, 5, tier=Tier.G3))
    match = bench.indexer.score(TEXT).workers[Holder("a")]
    assert (match.blocks, match.score) == (3, 2.5)
    assert "G3, which earns nothing" in bench.indexer.explain(TEXT, Holder("a")).groups[0].why


def test_d16_asking_leaves_no_row_that_could_expire() -> None:
    """Rows come and go by events only: two requests with one prefix share nothing that the first to end could take away."""
    bench = Bench()
    bench.say(stored(TEXT, 4, 0, 2))
    before = bench.indexer.backend.usage()
    answers = [bench.indexer.score([*TEXT, 1], now=now).workers[Holder("a")] for now in (0, 10**9, 10**15)]
    assert [answer.tokens for answer in answers] == [8, 8, 8] and answers[-1].age == 10**15
    assert bench.indexer.backend.usage() == before
