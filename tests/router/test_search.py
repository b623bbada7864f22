"""A search by rank finds what a look at every worker finds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.replay.traces.support import CONVERSATION
from tests.router.support import SIZE, chain, index_for

from kvyard.blocks import GroupSpec
from kvyard.engine.config import EngineConfig
from kvyard.events.types import EventBatch, Removed, Stored, Tier
from kvyard.index import Holder, Source
from kvyard.replay.fleet import Fleet
from kvyard.replay.report import make_report
from kvyard.replay.run import as_config, limited
from kvyard.router import POLICIES, Match, Router, RouterConfig, RouteRequest, RoutingInput, WorkerLoad, search
from kvyard.router.pace import Pace, engine_pace
from kvyard.router.policies import make_policy
from kvyard.router.ranking import Ranking, most, nth_slot

MS = 1_000_000
NEVER = 1 << 40
HYBRID = (GroupSpec(block_size=SIZE), GroupSpec(kind="sliding_window", window=2 * SIZE + 1, block_size=SIZE))
KINDS = st.sampled_from((1, 2, 3, 0))
"""Kinds of workers; with 0, how fast they are is learnt."""
CONFIGS: list[dict[str, Any]] = [
    {"policy": "kv"},
    {"policy": "kv", "predicted_ttl_s": 0.0},
    {"policy": "kv", "overlap_credit": 0.5},
    {"policy": "kv", "overlap_decay": 0.7},
    {"policy": "kv", "prefill_scale": 1.7, "held_weight": 0.3, "request_weight": 0.1},
    {"policy": "kv", "held_weight": 0.0, "overlap_credit": 2.0},
    {"policy": "kv", "track_output": True, "reserve_output": 0.5},
    {"policy": "approx"},
    {"policy": "affinity", "fallback": "kv"},
    {"policy": "affinity", "fallback": "least-time"},
    {"policy": "least-time"},
    {"policy": "least-time", "options": {"stickiness": 0.0, "renewal": 3.0}},
    {"policy": "least-time", "options": {"interference": 5.0, "renewal_s": 0.001}},
    {"policy": "least-time", "options": {"blocking": 50.0}},
    {"policy": "least-loaded", "load": "requests"},
    {"policy": "least-loaded", "load": "tokens"},
    {"policy": "least-loaded", "load": "blocks"},
    {"policy": "kv", "host_credit": 0.3},  # sums are rounded
    {"policy": "kv", "guard": 3.0},
    {"policy": "kv", "host_credit": 1, "storage_credit": 0, "remote_credit": 0},
]


def paces(kinds: int) -> list[Pace]:
    """How fast workers are: the second of two kinds has hardly any room, three kinds have enough."""
    rooms = (4096, 8192, 6000) if kinds == 3 else (4096, 24)[:kinds]
    return [engine_pace(EngineConfig(num_gpu_blocks=blocks, block_size=SIZE)) for blocks in rooms]


class Pair:
    """Two routers over one index that get the same calls: one looks at every worker, one searches by rank."""

    def __init__(self, workers: int, seed: int, kinds: int, config: dict[str, Any], tiers: int = 1) -> None:
        """``tiers``: 1 for device memory alone, 2 for host memory too, 3 for a pool as well that every second worker shares;
        4 is 2 where two of three workers have two groups, of which one has a window.
        """
        self.names = [f"w{at}" for at in range(workers)]
        self.tiers = tiers
        self.hybrid = set(self.names) - set(self.names[::3]) if tiers == 4 else set()
        self.indexer = index_for([name for name in self.names if name not in self.hybrid])
        for name in sorted(self.hybrid):
            self.indexer.register(Source(stream=name, worker=name, groups=HYBRID))
        if tiers == 3:
            self.indexer.register(Source(stream="pool", pool="pool"))
            self.indexer.share("pool", [Holder(name) for name in self.names[::2]])
        self.seqs = dict.fromkeys([*self.names, "pool"], 0)
        made = RouterConfig(**config)
        self.routers = [Router(made, (), self.indexer, seed, large=large) for large in (NEVER, 1)]
        speeds = paces(kinds)
        for at, name in enumerate(self.names):
            for router in self.routers:
                router.add_worker(name, pace=speeds[at % kinds] if kinds else None)
            for group in self.groups(name):
                hashes = [(1 << 62) + at]
                self.say(name, Stored(hashes=hashes, parent=None, tokens=None, block_size=SIZE, group=group))

    def say(self, worker: str, event: Stored | Removed) -> None:
        self.indexer.apply_batch(EventBatch(stream=worker, seq=self.seqs[worker], events=[event]))
        self.seqs[worker] += 1

    def groups(self, worker: str) -> Sequence[int | None]:
        """Return the names of its groups in events."""
        return (0, 1) if worker in self.hybrid else (None,)

    def both(self, ask: str, *args: Any, **kwargs: Any) -> Any:
        """The answer of both, which must be equal."""
        scan, ranked = [getattr(router, ask)(*args, **kwargs) for router in self.routers]
        assert scan == ranked
        return scan


def compare(workers: int, seed: int, kinds: int, config: dict[str, Any], tiers: int, steps: int) -> None:
    """Matches are small here. So in three of four walks they are searched by rank, as large ones are; not where that is
    compiled.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "FEW", 1 if seed % 4 else search.FEW)
        drive(Pair(workers, seed, kinds, config, tiers), random.Random(seed), steps)


def drive(pair: Pair, rng: random.Random, steps: int) -> None:
    """A walk of requests, first tokens, ends, events and workers that come and go."""
    prompts = [chain([f"s{at % 3}", *(f"p{at}.{block}" for block in range(rng.randrange(1, 12)))]) for at in range(9)]
    prompts += [chain(["s0", *(f"p0.{block}" for block in range(5)), f"q{at}"]) for at in range(4)]
    under_way: list[str] = []
    now = 0
    for step in range(steps):
        now += rng.choice((0, 1, 40, 3000)) * MS
        what = rng.random()
        if what < 0.5:
            keys = rng.choice(prompts)[: rng.randrange(1, 14)]
            exclude = [Holder(rng.choice(pair.names))] if rng.random() < 0.1 else []
            request = RouteRequest(f"r{step}", keys, len(keys) * SIZE + rng.randrange(0, SIZE), f"c{step % 5}", 20)
            if len(pair.routers[0].workers) > 2:
                pair.both("preview", request, now, exclude=exclude)
                pair.both("route", request, now, exclude=exclude, detail=rng.random() < 0.2)
                under_way.append(request.id)  # type: ignore[arg-type]
        elif what < 0.65 and under_way:
            pair.both("prefill_done", rng.choice(under_way), now)
        elif what < 0.7 and under_way:
            pair.both("progressed", rng.choice(under_way), rng.randrange(60), now)
        elif what < 0.8 and under_way:
            name = under_way.pop(rng.randrange(len(under_way)))
            pair.both(rng.choice(("finished", "refused")), name, now)
        elif what < 0.95:
            keys = rng.choice(prompts)
            tier = rng.choice((Tier.G1, Tier.G2, Tier.G4)[: 2 if pair.tiers == 4 else pair.tiers])
            worker = "pool" if tier == Tier.G4 else rng.choice(pair.names)
            first, last = rng.randrange(len(keys)), rng.randrange(1, 13)
            groups, stores = pair.groups(worker), rng.random() < 0.7
            for group in groups if stores or len(groups) == 1 else rng.sample(groups, 1):
                if stores:
                    event = Stored(
                        hashes=keys[:last], parent=None, tokens=None, block_size=SIZE, tier=tier, group=group
                    )
                    pair.say(worker, event)
                else:
                    pair.say(
                        worker, Removed(hashes=keys[first:] if not group else keys[:first], tier=tier, group=group)
                    )
        else:
            worker = rng.choice(pair.names)
            known = {holder.name for holder in pair.routers[0].workers}
            if worker not in known:
                for router in pair.routers:
                    router.add_worker(worker)
            elif len(known) > 3:
                pair.both(rng.choice(("drain", "remove_worker")), worker)
                if len(known) - len(pair.routers[0]._draining) < 3:
                    for router in pair.routers:
                        for name in known:
                            router.add_worker(name)
    for router in pair.routers:
        router.check_integrity()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: "-".join(map(str, config.values())))
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 1 << 30), workers=st.sampled_from((3, 9, 70)), kinds=KINDS, tiers=st.integers(1, 4))
def test_a_search_by_rank_is_a_scan(config: dict[str, Any], seed: int, workers: int, kinds: int, tiers: int) -> None:
    compare(workers, seed, kinds, config, tiers, 60)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: "-".join(map(str, config.values())))
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), workers=st.integers(3, 150), kinds=KINDS, tiers=st.integers(1, 4))
def test_a_search_by_rank_is_a_scan_at_length(
    config: dict[str, Any], seed: int, workers: int, kinds: int, tiers: int
) -> None:
    compare(workers, seed, kinds, config, tiers, 250)


def test_one_of_them_ranks_and_the_other_does_not() -> None:
    pair = Pair(9, 1, 1, {"policy": "kv"})
    drive(pair, random.Random(1), 20)
    assert [router.loads.ranking is not None for router in pair.routers] == [False, True]


def test_few_of_many_workers_are_looked_at() -> None:
    """Costs are asked of a fleet of 400: of the worker that has the prompt, and of few others."""
    pair = Pair(400, 1, 1, {"policy": "least-time"})
    looked: list[int] = []
    costs_of = pair.routers[1].policy.costs

    def counted(routing: RoutingInput) -> object:
        costs = costs_of(routing)

        class Counted:
            lower_bound = staticmethod(costs.lower_bound)

            @staticmethod
            def cost(worker: WorkerLoad, match: Match) -> float:
                looked.append(worker.slot)
                return costs.cost(worker, match)

        return Counted()

    pair.routers[1].policy.costs = counted  # type: ignore[method-assign, assignment]
    for step in range(200):
        keys = chain([f"f{step % 20}.{at}" for at in range(9)])
        pair.both("route", RouteRequest(step, keys, len(keys) * SIZE), step * MS)
    assert len(looked) < 200 * 20


def test_workers_that_turn_out_to_be_slow() -> None:
    pair = Pair(12, 3, 0, {"policy": "least-time"})
    rng, now = random.Random(3), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "FEW", 1)
        for step in range(150):
            keys = chain([f"u{step}.{at}" for at in range(rng.randrange(1, 9))])
            decision = pair.both("route", RouteRequest(step, keys, len(keys) * SIZE), now)
            slow = 6 if decision.worker.name in ("w3", "w7") else 1
            now += slow * len(keys) * MS
            pair.both("prefill_done", step, now)
            if rng.random() < 0.7:
                pair.both("finished", step, now)
    apart = [worker for worker in pair.names if pair.routers[1].pace(Holder(worker)).prefill(1000) != usual(pair)]
    assert 0 < len(apart) < 12
    assert all(len(router._paces.speeds) == 1 + len(apart) for router in pair.routers)


def usual(pair: Pair) -> float:
    """Return the time of most workers for a thousand tokens."""
    times = [pair.routers[1].pace(Holder(worker)).prefill(1000) for worker in pair.names]
    return max(set(times), key=times.count)


def test_predicted_device_blocks_are_not_counted_again_in_lower_tiers() -> None:
    pair = Pair(4, 0, 1, {"policy": "kv"}, 3)
    keys = chain([f"t{at}" for at in range(9)])
    for worker, tier, blocks in (("w0", Tier.G1, 1), ("w0", Tier.G2, 4), ("pool", Tier.G4, 8), ("w1", Tier.G2, 2)):
        pair.say(worker, Stored(hashes=keys[:blocks], parent=None, tokens=None, block_size=SIZE, tier=tier))
    tiers = []
    for at, blocks in enumerate((2, 5, 7, 9)):
        for router in pair.routers:
            router.book(RouteRequest(at, keys[:blocks], blocks * SIZE + 1), Holder("w0"), at)
        decision = pair.both("preview", RouteRequest("r", keys, 9 * SIZE + 1), at)
        tiers.append(decision.candidates[0].tiers)
    assert tiers == [(2, 2, 0, 4), (5, 0, 0, 3), (7, 0, 0, 1), (9, 0, 0, 0)]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9)), max_size=60))
def test_a_ranking_keeps_workers_in_order(ranks: list[tuple[int, int]]) -> None:
    ranking = Ranking()
    of: dict[int, int] = {}
    for slot, rank in ranks:
        ranking.put(slot, rank // 4, rank % 4 / 2)
        of[slot] = rank
    ranking.check_integrity()
    found: dict[int, int] = {}
    for number in ranking.order:
        for figure, slots in ranking.buckets[number].slots():
            found[number * 4 + int(2 * figure)] = slots
    assert list(found) == sorted(set(of.values()))
    for rank, slots in found.items():
        assert slots == sum(1 << slot for slot in of if of[slot] == rank)


@settings(max_examples=20)
@given(st.sets(st.integers(0, 400), min_size=1, max_size=20))
def test_slots_of_a_set_by_number(slots: set[int]) -> None:
    mask = sum(1 << slot for slot in slots)
    assert [nth_slot(mask, at) for at in range(len(slots))] == sorted(slots)


def test_the_most_blocks_of_a_set() -> None:
    levels = [(7, 0b1100), (2, 0b0010)]
    assert most(levels, 0b10111) == (7, 0b100)
    assert most(levels, 0b10011) == (2, 0b10)
    assert most(levels, 0b10001) == (0, 0)


RANKED = [name for name in POLICIES.names() if make_policy(RouterConfig(policy=name)).ranked]


class ScanningFleet(Fleet):
    """One whose router looks at every worker."""

    def _make_router(self, config: RouterConfig, number: int, reads_index: bool = True) -> Router:
        made = super()._make_router(config, number, reads_index)
        return Router(made.config, (), self.indexer, seed=self.config.seed + number, large=NEVER)


@pytest.mark.slow
@pytest.mark.source  # it derives from a compiled class
@pytest.mark.parametrize("policy", RANKED)
def test_a_search_by_rank_is_a_scan_on_a_trace_with_512_workers(policy: str) -> None:
    compare_fleets({"router": policy, "block_size": 64, "num_gpu_blocks": 2048}, 2000)


@pytest.mark.slow
@pytest.mark.source
@pytest.mark.parametrize("policy", ["kv", "least-time"])
def test_a_search_by_rank_is_a_scan_for_a_hybrid_model_with_512_workers(policy: str) -> None:
    groups = [{"kind": "full", "block_size": 64}, {"kind": "sliding_window", "block_size": 64, "window": 1024}]
    compare_fleets({"router": policy, "groups": groups, "num_gpu_blocks": 4096}, 600)


def compare_fleets(settings: dict[str, Any], requests: int) -> None:
    config = as_config(None, {"workers": 512, "speedup": 64, **settings})
    reports = []
    for kind in (ScanningFleet, Fleet):
        fleet = kind(config)
        fleet.run(limited(CONVERSATION, requests))
        reports.append(msgspec.json.encode(make_report(fleet)))
    assert fleet.router.loads.ranking is not None
    assert reports[0] == reports[1]
