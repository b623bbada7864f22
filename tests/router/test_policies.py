"""Each policy, ties, chance, the guard."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.router.support import SECOND, Fleet, index_for

import kvyard
from kvyard.errors import KvyardError
from kvyard.index import Holder
from kvyard.replay.traces import TraceRequest
from kvyard.router import POLICIES, Choice, Policy, Router, RouterConfig, RouteRequest, RoutingInput
from kvyard.router.policies import make_policy
from kvyard.router.policies.affinity import Affinity

EIGHT = tuple("abcdefgh")


def picks(fleet: Fleet, count: int, **options: object) -> list[str]:
    return [fleet.route([f"new {fleet.count}"], **options).worker.name for _ in range(count)]


class TestSimple:
    def test_round_robin_takes_turns_in_order(self) -> None:
        assert picks(Fleet(("c", "a", "b"), index=False, policy="round-robin"), 7) == list("cabcabc")

    def test_one_who_is_left_out_doesnt_shift_the_turns(self) -> None:
        fleet = Fleet(("a", "b", "c"), index=False, policy="round-robin")
        assert picks(fleet, 1) == ["a"]
        assert picks(fleet, 1, exclude=[Holder("b")]) == ["c"]
        assert picks(fleet, 2) == ["a", "b"]
        fleet.router.drain("c")
        assert picks(fleet, 2) == ["a", "b"]
        fleet.router.add_worker("c")
        assert picks(fleet, 1) == ["c"]

    def test_random_is_even_and_seeded(self) -> None:
        def run(seed: int) -> list[str]:
            fleet = Fleet(EIGHT, index=False, policy="random", seed=seed)
            return [fleet.pick("x") for _ in range(800)]

        runs = [run(seed) for seed in (1, 1, 2)]
        assert runs[0] == runs[1] != runs[2]
        assert all(60 < count < 140 for count in Counter(runs[0]).values())

    def test_least_loaded_by_requests_tokens_or_blocks(self) -> None:
        # a has one long request that is past its prefill, b two short ones that aren't.
        expected = {"requests": "a", "tokens": "a", "blocks": "b"}
        for load, worker in expected.items():
            fleet = Fleet(index=False, policy="least-loaded", load=load)
            fleet.route(list(range(100)), id_="long", exclude=[Holder("b")])
            fleet.router.prefill_done("long", 0)
            for _ in range(2):
                fleet.route([fleet.count], exclude=[Holder("a")])
            assert fleet.route(["x"]).worker.name == worker

    def test_without_overlap_everyone_still_says_what_was_there(self) -> None:
        fleet = Fleet(("a", "b"), policy="round-robin")
        fleet.store("b", "abc")
        decision = fleet.route("abc")
        assert (decision.worker.name, decision.overlap, decision.best, decision.regret) == ("a", 0, 3, 3)
        assert decision.best_worker == Holder("b")
        assert fleet.route("abc").regret == 0

    def test_a_policy_of_ones_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Last(Policy):
            def choose(self, routing: RoutingInput) -> Choice:
                return Choice(routing.workers[-1].slot, why="last")

        monkeypatch.setattr(POLICIES, "_loaded", dict(POLICIES._loaded))
        POLICIES.register("last", Last)
        fleet = Fleet(("a", "b"), index=False, policy="last")
        decision = fleet.route("x")
        assert decision.worker == Holder("b") and "b@0: last." in fleet.router.explain(decision)


class TestChance:
    def test_ties_are_broken_evenly_and_by_the_seed(self) -> None:
        def run(seed: int) -> list[str]:
            fleet = Fleet(("a", "b", "c"), seed=seed)
            return [fleet.pick([f"t{at}"]) for at in range(300)]

        assert run(5) == run(5) != run(6)
        assert all(70 < count < 130 for count in Counter(run(5)).values())
        fleet = Fleet(("a", "b", "c"))
        assert fleet.route("x").tied == 3 and fleet.route("y").tied == 2

    def test_temperature_draws_by_softmax_of_scaled_costs(self) -> None:
        fleet = Fleet(("a", "b", "c"), temperature=0.5, predicted_ttl_s=0, request_weight=1.0)
        fleet.say("a"), fleet.say("b")
        # Costs 0, 1/2 and 1 of the spread: 1 : e^-1 : e^-2.
        for blocks, worker in ((20, "b"), (40, "c")):
            prompt = [f"{worker}{at}" for at in range(blocks)]
            fleet.route(prompt, exclude=[Holder(other) for other in "abc" if other != worker], tokens=blocks * 4)
        for worker in fleet.router.loads.workers:
            worker.requests = 0
        counts = Counter(fleet.router.policy.choose(_routing_input(fleet)).slot for _ in range(6000))
        total = 1 + 0.3679 + 0.1353
        for slot, weight in enumerate((1, 0.3679, 0.1353)):
            assert counts[slot] / 6000 == pytest.approx(weight / total, abs=0.03)

    def test_temperature_among_equals_is_even(self) -> None:
        fleet = Fleet(("a", "b"), temperature=1.0, predicted_ttl_s=0)
        counts = Counter(fleet.pick([f"e{at}"]) for at in range(600))
        assert abs(counts["a"] - 300) < 60


def _routing_input(fleet: Fleet) -> RoutingInput:
    from kvyard.router import RouteRequest

    router = fleet.router
    return RoutingInput(RouteRequest("q", [], 4), 0, router.loads.workers, 0b111, router.loads, None, [], router._rng)


class TestGuard:
    def test_the_guard_overrules_the_cache_if_loads_are_too_far_apart(self) -> None:
        fleet = Fleet(("a", "b"), guard=3, guard_ratio=1.5, predicted_ttl_s=0)
        fleet.store("a", list("abcdefghijklmnopqrst"))
        prompt = list("abcdefghijklmnopqrst")
        for _ in range(4):
            decision = fleet.route(prompt)
            fleet.router.prefill_done(decision.id, 0)
            assert (decision.worker.name, decision.why) == ("a", "cost")
        decision = fleet.route(prompt)
        assert (decision.worker.name, decision.why, decision.regret) == ("b", "guard", 20)
        assert fleet.route(prompt).why == "cost"

    def test_the_ratio_must_be_exceeded_too(self) -> None:
        fleet = Fleet(("a", "b"), guard=3, guard_ratio=2.0, predicted_ttl_s=0, policy="approx", index=False)
        for _ in range(8):
            fleet.route([f"b{fleet.count}"], exclude=[Holder("a")])
        for _ in range(4):
            fleet.route([f"a{fleet.count}"], exclude=[Holder("b")])
        assert fleet.route("x", id_="x").why == "cost" and fleet.router.finished("x", 0)
        fleet.route(["more"], exclude=[Holder("a")])
        assert fleet.route("y").why == "guard"

    def test_round_robin_needs_none(self) -> None:
        fleet = Fleet(("a", "b"), index=False, policy="round-robin", guard=0)
        for _ in range(3):
            fleet.route([f"a{fleet.count}"], exclude=[Holder("b")])
        assert [fleet.route("x").why, fleet.route("y").why] == ["turn", "turn"]


class TestAffinity:
    def test_a_session_stays_while_it_sends_requests(self) -> None:
        fleet = Fleet(EIGHT, index=False, policy="affinity", fallback="round-robin", session_ttl_s=10)
        assert fleet.pick("x", session="s") == "a"
        fleet.pick("x"), fleet.pick("x", session="t")
        for _ in range(5):
            fleet.now += 9 * SECOND
            decision = fleet.route("y", session="s")
            assert (decision.worker.name, decision.why) == ("a", "session")
        fleet.now += 10 * SECOND
        decision = fleet.route("y", session="s")
        assert decision.why == "turn"

    def test_a_session_is_forgotten_when_its_time_is_over_and_not_before(self) -> None:
        fleet = Fleet(EIGHT, index=False, policy="affinity", fallback="round-robin", session_ttl_s=10)
        policy = fleet.router.policy
        assert isinstance(policy, Affinity)
        fleet.pick("x", session="s")
        fleet.now += 10 * SECOND - 1
        fleet.pick("x", session="t")
        assert len(policy) == 2
        fleet.now += 1
        fleet.pick("x", session="u")
        assert len(policy) == 2, "s was last heard of ten seconds ago"

    def test_a_session_moves_when_its_worker_drains_dies_or_is_excluded(self) -> None:
        fleet = Fleet(("a", "b", "c"), index=False, policy="affinity", fallback="least-loaded")
        home = fleet.pick("x", session="s")
        fleet.router.drain(home)
        second = fleet.pick("x", session="s")
        assert second != home
        fleet.router.add_worker(home)
        assert fleet.pick("x", session="s") == second
        fleet.router.remove_worker(second)
        third = fleet.pick("x", session="s")
        assert third != second
        fleet.router.add_worker("new")  # takes the slot of the one that is gone, and not its sessions
        assert fleet.pick("x", session="s") == third
        assert fleet.pick("x", session="s", exclude=[Holder(third)]) != third

    def test_a_worker_in_a_reused_slot_does_not_inherit_sessions(self) -> None:
        fleet = Fleet(("a", "b"), index=False, policy="affinity", fallback="round-robin")
        assert fleet.pick("x", session="s") == "a"
        fleet.router.remove_worker("a")
        fleet.router.add_worker("new")
        assert fleet.route("x", session="s").why == "turn"

    def test_the_guard_sends_one_request_away_and_not_the_session(self) -> None:
        fleet = Fleet(("a", "b"), index=False, policy="affinity", fallback="round-robin", guard=2)
        for _ in range(3):
            assert fleet.route([fleet.count], session="s").worker.name == "a"
        decision = fleet.route("x", session="s")
        assert (decision.worker.name, decision.why) == ("b", "guard")
        decision = fleet.route("x", session="s")
        assert (decision.worker.name, decision.why) == ("a", "session")

    def test_its_fallback_may_read_the_index_or_its_own_memory(self) -> None:
        fleet = Fleet(("a", "b"), policy="affinity")
        fleet.store("b", "abcdef")
        assert fleet.pick("abcdef", session="s") == "b"
        fleet = Fleet(EIGHT, index=False, policy="affinity", fallback="approx")
        home = fleet.pick("abc", session="s")
        assert fleet.pick("abcd", session="t") == home

    def test_sessions_are_bounded(self) -> None:
        fleet = Fleet(("a", "b"), index=False, policy="affinity", fallback="round-robin", sessions=3)
        for at in range(10):
            fleet.pick("x", session=f"s{at}")
        assert len(fleet.router.policy) == 3  # type: ignore[arg-type]
        assert fleet.route("x", session="s9").why == "session"
        assert fleet.route("x", session="s0").why == "turn"
        fleet.now += 601 * SECOND
        fleet.pick("x", session="late")
        assert len(fleet.router.policy) == 1  # type: ignore[arg-type]


def test_every_policy_is_deterministic() -> None:
    for name in POLICIES.names():
        runs = []
        for _ in range(2):
            fleet = Fleet(("a", "b", "c"), policy=name, seed=9)
            run = []
            for at in range(60):
                decision = fleet.route([at % 5, at % 3, at], session=f"s{at % 4}")
                run.append(decision)
                fleet.now += SECOND // 3
                if at % 3 == 2:
                    fleet.store(decision.worker.name, [at % 5, at % 3, at])
                    fleet.router.finished(at - 1, fleet.now)
            runs.append(run)
        assert runs[0] == runs[1], name


def test_an_index_is_needed_only_where_it_is_read() -> None:
    with pytest.raises(KvyardError, match="policy kv routes by an index"):
        Fleet(index=False, policy="kv")
    with pytest.raises(KvyardError, match="policy kv routes by an index"):
        Fleet(index=False, policy="affinity")
    with pytest.raises(KvyardError, match="give block_size"):
        from kvyard.router import Router

        Router(RouterConfig(policy="approx"), ["a"])


PLUGIN = """
from kvyard.router import Choice, Policy


class Longest(Policy):
    needs_index = True

    def choose(self, routing):
        longest = routing.longest_matches[0]
        return Choice((longest.slots & -longest.slots).bit_length() - 1, why="longest")
"""


@pytest.fixture
def longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a policy that reads the index and comes from an installed package."""
    (tmp_path / "longest_pack.py").write_text(PLUGIN)
    info = tmp_path / "longest_pack-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: longest-pack\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvyard.policies]\nlongest = longest_pack:Longest\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(POLICIES, "_plugins", None)
    yield "longest"
    POLICIES._loaded.pop("longest", None)
    sys.modules.pop("longest_pack", None)


class TestFromOutside:
    """A policy of an installed package is one more name, wherever policies are chosen."""

    def test_the_replay_gives_it_an_index(self, longest: str) -> None:
        trace = [
            TraceRequest(
                f"r{at}", at * SECOND, 640, 4, ids=tuple(range(10 * (at % 3), 10 * (at % 3) + 10)), id_block_size=64
            )
            for at in range(9)
        ]
        run = kvyard.replay(trace, router=longest, workers=3, block_size=64, num_gpu_blocks=100)
        # Everything goes where something is: at first to w0, which then has what all the others ask for.
        assert {record.worker for record in run.records} == {"w0"}
        assert [record.overlap for record in run.records] == [0] * 3 + [9] * 6

    def test_the_gateway_takes_it(self, longest: str) -> None:
        from kvyard.server.gateway.config import GatewayConfig

        config = GatewayConfig(router=RouterConfig(policy=longest))
        router = Router(config.router, ["a", "b"], index_for(["a", "b"]))
        assert router.route(RouteRequest("r", [1, 2], 9), 0).why == "longest"

    def test_its_name_is_in_help_and_refusals(self, longest: str) -> None:
        assert longest in POLICIES.names()
        with pytest.raises(KvyardError, match=f"choose one of .*{longest}"):
            RouterConfig(policy="shortest")


def test_options_beside_affinity_are_its_fallbacks() -> None:
    config = RouterConfig(policy="affinity", fallback="least-time", options={"stickiness": 2.0})
    assert make_policy(config).fallback.options["stickiness"] == 2.0
    with pytest.raises(KvyardError, match="unknown option 'stickyness' of the routing policy least-time"):
        make_policy(RouterConfig(policy="affinity", fallback="least-time", options={"stickyness": 2.0}))


def test_a_cost_that_is_no_number_is_refused_at_the_first_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pair(Policy):
        def cost(self, worker, match):
            return worker.requests, worker.prefill_tokens

    monkeypatch.setattr(POLICIES, "_loaded", dict(POLICIES._loaded))
    POLICIES.register("pair", Pair)
    fleet = Fleet(("a", "b"), index=False, policy="pair")
    with pytest.raises(KvyardError, match=r"Pair.cost must return a number, not \(0, 0\)"):
        fleet.route("x")


@pytest.mark.parametrize("policy", ["least-time", "round-robin", "lmetric"])
def test_a_temperature_is_refused_by_policies_that_draw_nothing(policy: str) -> None:
    with pytest.raises(KvyardError, match=f"temperature is for .* not for {policy}: leave it out"):
        make_policy(RouterConfig(policy=policy, temperature=0.5))
    with pytest.raises(KvyardError, match=f"not for {policy}"):
        make_policy(RouterConfig(policy="affinity", fallback=policy, temperature=0.5))
    assert make_policy(RouterConfig(policy="affinity", fallback="approx", temperature=0.5)).draws
