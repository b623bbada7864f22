"""The index as a router sees it: hybrid models, stale streams, pools, coarse blocks; rosters against full scores."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.levels import by_slot
from tests.router.support import SIZE, Fleet, chain, index_for

from kvyard.blocks import GroupSpec
from kvyard.events.transport import Origin, State, Update
from kvyard.events.types import Stored, Tier
from kvyard.index import Holder, Source, Trust
from kvyard.router import RouteRequest

PROMPT = list("abcdefghij")
HYBRID = [
    GroupSpec(kind="full", block_size=SIZE),
    GroupSpec(kind="sliding_window", block_size=SIZE, window=2 * SIZE),
]


class TestHybrid:
    def test_a_prefix_counts_as_far_as_every_group_can_use_it(self) -> None:
        fleet = Fleet(("a", "b"), index=index_for(("a", "b"), groups=HYBRID), predicted_ttl_s=0)
        for worker in "ab":
            fleet.store(worker, PROMPT, group=0)
        fleet.store("a", PROMPT, 8, 10, group=1)
        fleet.store("b", PROMPT, 3, 5, group=1)
        decision = fleet.route(PROMPT, detail=True)
        assert {one.worker.name: one.device for one in decision.candidates} == {"a": 10, "b": 5}
        assert decision.worker == Holder("a")

    def test_nothing_is_predicted_for_it(self) -> None:
        """What its window keeps by then, nobody can say before its events do."""
        fleet = Fleet(("a",), index=index_for(("a",), groups=HYBRID))
        fleet.store("a", PROMPT, 0, 4, group=0)
        fleet.store("a", PROMPT, 2, 4, group=1)
        fleet.route(PROMPT)
        decision = fleet.route(PROMPT)
        assert (decision.device, decision.predicted) == (4, 0)

    def test_larger_engine_blocks_come_in_steps(self) -> None:
        indexer = index_for(("a",), groups=[GroupSpec(kind="full", block_size=SIZE)], alignment=4 * SIZE)
        fleet = Fleet(("a",), index=indexer)
        fleet.store("a", PROMPT, 0, 6)
        first = fleet.route([*PROMPT, *"klmno"])
        assert first.device == 4
        # 15 blocks were sent: 12 of them can be hits.
        assert fleet.route([*PROMPT, *"klmno"]).device == 12


class TestTrust:
    def test_a_stale_stream_earns_nothing(self) -> None:
        fleet = Fleet(("a", "b"), predicted_ttl_s=0)
        fleet.store("a", PROMPT)
        fleet.store("b", PROMPT, 0, 2)
        assert fleet.route(PROMPT).best == 10
        assert fleet.indexer is not None
        fleet.indexer.lose("a", "a cable was pulled")
        decision = fleet.route(PROMPT)
        assert (decision.best, decision.best_worker) == (2, Holder("b"))

    def test_half_trust_is_half_a_credit(self) -> None:
        fleet = Fleet(("a", "b"), index=index_for(("a", "b"), trust=Trust(catching_up=0.5)), predicted_ttl_s=0)
        fleet.store("a", PROMPT)
        fleet.store("b", PROMPT)
        fleet.say("b", state=State.CATCHING_UP)
        decision = fleet.route(PROMPT, detail=True)
        costs = {one.worker.name: one.cost for one in decision.candidates}
        assert costs == {"a": 41 / SIZE - 10 + 10, "b": 41 / SIZE - 5 + 10}

    def test_a_worker_unknown_to_the_index_has_no_prefix(self) -> None:
        fleet = Fleet(("a",), index=index_for(()))
        assert fleet.route(PROMPT).best == 0
        assert fleet.route(PROMPT).predicted == 10


def test_a_pool_is_credited_to_its_members() -> None:
    indexer = index_for(("a", "b", "c"))
    indexer.register(Source(stream="pool", pool="p"))
    indexer.share("p", [Holder("a"), Holder("b")])
    fleet = Fleet(("a", "b", "c"), index=indexer, predicted_ttl_s=0)
    for worker in "abc":
        fleet.say(worker)
    fleet.store("b", PROMPT, 0, 2)
    fleet.store("pool", PROMPT, tier=Tier.G3)
    # Who has never announced anything has no known groups, so nothing of the pool can be credited to it either.
    for worker in "ac":
        fleet.store(worker, ["x"])
    decision = fleet.route(PROMPT, detail=True)
    found = {one.worker.name: one.tiers for one in decision.candidates}
    assert found == {"a": (0, 0, 10), "b": (2, 0, 8), "c": (0, 0, 0)}
    assert decision.worker == Holder("b")
    assert decision.cost == pytest.approx(41 / SIZE - (2 + 0.25 * 8) + 10)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.lists(st.integers(0, 1), min_size=1, max_size=7),
        st.integers(0, 4),
        st.sampled_from([Tier.G1, Tier.G1, Tier.G2, Tier.G3]),
        st.sampled_from([0, 1]),
    ),
    max_size=20,
)


@settings(deadline=None)
@given(
    events=EVENTS,
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=8),
    short=st.integers(0, 5),
    kinds=st.fixed_dictionaries({worker: st.sampled_from(["plain", "hybrid", "coarse"]) for worker in "abc"}),
)
def test_a_roster_says_what_a_full_score_says(
    events: list[tuple[str, list[int], int, Tier, int]], prompt: list[int], short: int, kinds: dict[str, str]
) -> None:
    indexer = index_for(())
    plain = GroupSpec(kind="full", block_size=SIZE)
    for worker, kind in kinds.items():
        fields: dict[str, Any] = {"groups": HYBRID if kind == "hybrid" else [plain]}
        if kind == "coarse":
            fields["alignment"] = 2 * SIZE
        indexer.register(Source(stream=worker, worker=worker, **fields))
    seqs = dict.fromkeys("abc", -1)
    for worker, text, first, tier, group in events:
        keys = chain(text)
        if first >= len(keys) or (group and kinds[worker] != "hybrid"):
            continue
        seqs[worker] += 1
        event = Stored(
            hashes=keys[first:],
            parent=keys[first - 1] if first else None,
            tokens=None,
            block_size=SIZE,
            tier=tier,
            group=group if kinds[worker] == "hybrid" else None,
        )
        indexer.apply(
            Update(
                stream=worker,
                topic="",
                seq=seqs[worker],
                events=[event],
                dialect="map",
                epoch=0,
                origin=Origin.LIVE,
                state=State.FRESH,
            )
        )
    workers = [Holder("c"), Holder("unknown"), Holder("a")]
    roster = indexer.roster(workers)
    keys = chain(prompt)
    tokens = len(keys) * SIZE + 1 - short
    levels = [by_slot(level, len(workers)) for level in indexer.reaches(roster, keys, tokens)]
    scores = indexer.score_keys(keys, tokens, workers).workers
    for at, worker in enumerate(workers):
        match = scores[worker]
        longest = 0
        for tier, reach in zip(roster.tiers, levels, strict=False):
            assert reach[at] >= longest
            if tier in match.tiers:
                assert reach[at] == match.tiers[tier].reach // SIZE
            else:
                assert reach[at] == longest
            longest = reach[at]
        assert longest == match.blocks


def test_a_router_reads_an_index_that_others_feed() -> None:
    """The same roster is asked while streams come and go."""
    fleet = Fleet(("a", "b"), predicted_ttl_s=0)
    assert fleet.indexer is not None
    fleet.store("a", PROMPT)
    assert fleet.route(PROMPT).best == 10
    fleet.indexer.unregister("a")
    assert fleet.route(PROMPT).best == 0
    fleet.indexer.register(Source(stream="a", worker="a"))
    fleet.seqs.pop("a")
    fleet.store("a", PROMPT, 0, 3)
    assert fleet.router.route(RouteRequest("q", chain(PROMPT), 41), 0).best == 3
