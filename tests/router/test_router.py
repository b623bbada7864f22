"""Workers that come, drain and go; what is refused; explanations."""

from __future__ import annotations

import pytest
from tests.router.support import SECOND, SIZE, Fleet, chain, index_for

from kvyard.errors import KvyardError
from kvyard.events.types import Tier
from kvyard.index import Holder, Identity, Source
from kvyard.router import Reach, Router, RouterConfig, RouteRequest


class TestWorkers:
    def test_draining_ones_get_nothing_new_and_finish_what_they_have(self) -> None:
        fleet = Fleet(("a", "b"))
        fleet.store("a", "abc")
        first = fleet.route("abc")
        assert first.worker == Holder("a")
        fleet.router.drain("a")
        assert fleet.route("abc").worker == Holder("b")
        assert fleet.router.load(Holder("a")).requests == 1
        assert fleet.router.prefill_done(first.id, 0) and fleet.router.finished(first.id, 0)
        assert fleet.router.load(Holder("a")).blocks == 0

    def test_a_draining_worker_is_no_better_choice_that_was_missed(self) -> None:
        fleet = Fleet(("a", "b"))
        fleet.store("a", "abc")
        fleet.router.drain("a")
        assert (fleet.route("abc").best, fleet.route("abd").regret) == (0, 0)

    def test_removal_returns_requests_in_flight_and_frees_the_slot(self) -> None:
        fleet = Fleet(("a", "b"), policy="round-robin")
        ids = [fleet.route([at]).id for at in range(4)]
        assert fleet.router.remove_worker("a") == [ids[0], ids[2]]
        assert not fleet.router.finished(ids[0], 0)
        assert fleet.router.workers == [Holder("b")]
        fleet.router.add_worker("c")
        assert fleet.router.load(Holder("c")).requests == 0
        assert {fleet.route("x").worker.name for _ in range(2)} == {"b", "c"}
        with pytest.raises(KvyardError, match="no worker a"):
            fleet.router.drain("a")
        with pytest.raises(KvyardError, match="no worker z"):
            fleet.router.load(Holder("z"))

    def test_a_request_that_was_lost_may_be_routed_again(self) -> None:
        fleet = Fleet(("a", "b"))
        first = fleet.route("abc", id_="r")
        fleet.router.remove_worker(first.worker)
        assert fleet.route("abc", id_="r").worker != first.worker

    def test_ranks_are_choices_of_their_own(self) -> None:
        indexer = index_for(("a",), by_rank=True)
        router = Router(RouterConfig(policy="kv", predicted_ttl_s=0), [Holder("a", 0), Holder("a", 1)], indexer)
        fleet = Fleet(("a",), index=indexer)
        fleet.store("a", "abc", rank=1)
        decision = router.route(RouteRequest(1, chain("abc"), 13), 0)
        assert decision.worker == Holder("a", 1) and decision.tiers[0] == 3
        router.drain("a")
        with pytest.raises(KvyardError, match="no worker may be chosen"):
            router.route(RouteRequest(2, chain("abc"), 13), 0)
        assert router.remove_worker("a") == [1]

    def test_a_worker_that_joins_late_is_known_to_the_index_by_name(self) -> None:
        fleet = Fleet(("a",))
        assert fleet.indexer is not None
        fleet.indexer.register(Source(stream="b", worker="b"))
        fleet.store("b", "abc")
        assert fleet.route("abc").best == 0
        fleet.router.add_worker("b")
        assert fleet.route("abc").worker == Holder("b")

    def test_requests_that_nobody_reports_are_given_up(self) -> None:
        fleet = Fleet(("a",), forget_after_s=60)
        fleet.route("abc")
        fleet.now = 59 * SECOND
        fleet.route("abd")
        fleet.now = 61 * SECOND
        fleet.route("x")
        assert fleet.router.forgotten == 1
        assert fleet.router.load(Holder("a")).requests == 2


class TestSeveralRouters:
    def test_requests_routed_elsewhere_count_here_too(self) -> None:
        one, two = Fleet(("a", "b"), seed=1), Fleet(("a", "b"), seed=2)
        decision = one.route(list("abcdefgh"), id_="r")
        request = RouteRequest("r", chain("abcdefgh"), 33)
        two.router.book(request, decision.worker, 0, decision.new_tokens)
        loads = [fleet.router.load(decision.worker) for fleet in (one, two)]
        assert len({(load.prefill_tokens, load.blocks, load.requests) for load in loads}) == 1 and loads[0].requests
        for fleet in (one, two):
            assert fleet.router.prefill_done("r", 0)
            assert fleet.route(list("abcdefgh"), id_="s").worker == decision.worker
        assert two.router.finished("r", 0)
        with pytest.raises(KvyardError, match="'s' is in flight already"):
            two.router.book(RouteRequest("s", [], 1), decision.worker, 0)
        with pytest.raises(KvyardError, match="no worker z"):
            two.router.book(RouteRequest("t", [], 1), Holder("z"), 0)

    def test_approx_learns_from_it(self) -> None:
        fleet = Fleet(("a", "b"), index=False, policy="approx")
        fleet.router.book(RouteRequest("r", chain("abcdef"), 25), Holder("b"), 0)
        assert fleet.router.load(Holder("b")).prefill_tokens == 25
        fleet.router.finished("r", 0)
        assert fleet.route("abcdef").worker == Holder("b")


class TestRefusals:
    def test_nobody_to_choose_changes_nothing(self) -> None:
        fleet = Fleet(("a",), forget_after_s=1)
        fleet.route("x", id_="x")
        fleet.now = 5 * SECOND
        with pytest.raises(KvyardError, match="no worker may be chosen"):
            fleet.route("abc", id_="r", exclude=[Holder("a")])
        assert list(fleet.router.loads.active) == ["x"] and fleet.router.forgotten == 0
        assert fleet.route("abc", id_="r").worker == Holder("a")

    def test_a_request_id_is_in_flight_once(self) -> None:
        fleet = Fleet(("a",))
        fleet.route("x", id_="r")
        with pytest.raises(KvyardError, match="'r' is in flight already"):
            fleet.route("x", id_="r")

    def test_pools_are_not_routed_to(self) -> None:
        with pytest.raises(KvyardError, match="pool p can't be routed to"):
            Router(RouterConfig(policy="random"), [Holder("p", 0, True)])

    def test_block_sizes_that_differ(self) -> None:
        with pytest.raises(KvyardError, match="block_size 64 isn't the index's 4"):
            Fleet(("a",), block_size=64)

    @pytest.mark.parametrize(
        ("raw", "message"),
        [
            ({"policy": "best"}, "unknown routing policy 'best': choose one of affinity, aibrix, approx"),
            ({"temperature": -1}, "temperature of a router must be at least 0, got -1"),
            ({"temperature": float("nan")}, "temperature of a router must be at least 0, got nan"),
            ({"overlap_credit": "much"}, "overlap_credit of a router must be at least 0, got 'much'"),
            ({"guard_ratio": 0.5}, "guard_ratio of a router must be at least 1"),
            ({"guard": -2}, "guard of a router must be at least 0"),
            ({"load": "weight"}, "unknown load 'weight' of a router: choose one of blocks, requests, tokens"),
            ({"session_ttl_s": 0}, "session_ttl_s of a router must be more than 0"),
            ({"approx_ttl_s": 0}, "approx_ttl_s of a router must be more than 0"),
            ({"remembered_blocks": 0}, "remembered_blocks of a router must be a whole number of 1 or more"),
            ({"policy": "affinity", "fallback": "affinity"}, "fallback of a router can't be affinity itself"),
        ],
    )
    def test_bad_config(self, raw: dict[str, object], message: str) -> None:
        with pytest.raises(KvyardError, match=message.replace("(", "\\(")):
            RouterConfig(**raw)  # type: ignore[arg-type]


class TestExplanations:
    def test_cost_with_its_sum_and_what_was_left(self) -> None:
        fleet = Fleet(("a", "b"), predicted_ttl_s=0)
        fleet.store("a", list("abcdef"))
        fleet.store("b", list("abcdef"), 0, 2)
        fleet.store("b", list("abcdef"), 2, 5, tier=Tier.G2)
        for _ in range(3):
            fleet.route([f"load {fleet.count}"] * 3, exclude=[Holder("b")])
        decision = fleet.route(list("abcdef"), id_="r1", detail=True)
        assert fleet.router.explain(decision).splitlines() == [
            "r1: kv chose b@0: it costs least.",
            "Of 25 tokens (6 blocks) it has 2 in device memory, 3 more in host memory.",
            "Before this one it had 0 requests in flight, 0 tokens to prefill and 0 blocks held, 0 of them of this prompt.",
            "Cost 8 = max(0, (0 + 25) / 4 - 4.25) to prefill + 6 held.",
            "a@0 has 6: 1 block was left on the table.",
            "",
            "  worker  cost  device  host  storage  to prefill  held  shared  requests",
            "* b@0        8       2     3        0           0     0       0         0",
            "  a@0       25       6     0        0          39     9       0         3",
        ]

    def test_predictions_ties_and_nothing(self) -> None:
        fleet = Fleet(("a", "b"))
        text = fleet.router.explain(fleet.route("abc", id_="r"))
        assert "it costs least, like 1 other, and the seed decided." in text
        assert "It has nothing of the 13 tokens (3 blocks)." in text
        fleet.router.prefill_done("r", 0)
        text = fleet.router.explain(fleet.route("abc"))
        assert "3 in device memory, 3 of them not announced yet" in text and "No worker has more." in text

    def test_every_reason_has_words(self) -> None:
        guard = Fleet(("a", "b"), policy="affinity", fallback="round-robin", guard=0, guard_ratio=1)
        guard.route("x", session="s")
        assert "loads were too far apart" in guard.router.explain(guard.route("x", session="s"))
        for config, words in (
            ({"policy": "random"}, "by chance"),
            ({"policy": "round-robin"}, "it was its turn"),
            ({"policy": "least-loaded"}, "it has least to do"),
            ({"temperature": 1.0}, "drawn by cost"),
            ({"request_weight": 2.0, "prefill_scale": 3.0}, "= 3 * (0 + 5) / 4 to prefill + 1 held + 2 * 0 requests"),
        ):
            fleet = Fleet(("a",), **config)  # type: ignore[arg-type]
            assert words in fleet.router.explain(fleet.route("x"))


def test_a_prompt_without_a_full_block() -> None:
    fleet = Fleet(("a",))
    decision = fleet.route([], tokens=3)
    assert (decision.blocks, decision.cost) == (0, 3 / SIZE)
    assert fleet.router.finished(decision.id, 0)
    assert fleet.router.load(Holder("a")).prefill_tokens == 0


def test_an_index_elsewhere_is_given_by_its_identity_and_what_it_says() -> None:
    router = Router(RouterConfig(policy="kv"), ["a", "b", "c"], Identity(16))
    request = RouteRequest("r", [1, 2, 3], 49)
    assert router.preview(request, 0).overlap == 0
    told = {Holder("b"): Reach((2, 3, 3)), Holder("elsewhere"): Reach((9, 9, 9))}
    decision = router.route(request, 0, known=told)
    assert (decision.worker, decision.tiers) == (Holder("b"), (2, 1, 0))
    # What an uncertain stream said earns less, and what was sent since is credited on top.
    told = {Holder("a"): Reach((2, 2, 2), 0.5), Holder("c"): Reach((1, 1, 1))}
    figures = {
        one.worker.name: one for one in router.preview(RouteRequest("s", [1, 2, 3], 49), 1, known=told).candidates
    }
    assert (figures["a"].device, figures["b"].device, figures["c"].device) == (2, 3, 1)
    assert figures["b"].predicted == 3
    assert figures["a"].cost == figures["c"].cost
