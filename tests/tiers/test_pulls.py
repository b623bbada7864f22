"""Pulls from other workers: closed forms, and bytes that survive the way from one worker's tiers to another's device."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from tests.blocks.content import Corrupted, Job, pool_for
from tests.blocks.support import FULL
from tests.tiers.content import TieredEngine, TieredTraffic
from tests.tiers.support import BLOCK, Worker, tiers
from tests.tiers.test_store_content import NARROW, loose, spec

from kvyard.blocks import GroupSpec, Request
from kvyard.blocks.holds import Holds
from kvyard.blocks.table import BlockTable
from kvyard.events.types import Tier
from kvyard.tiers import LoadStep, offload
from kvyard.tiers.fabric import Fabric
from kvyard.tiers.network import Network
from kvyard.tiers.pulls import PeerPages, Pull, Pulls, PullSource
from kvyard.tiers.store import PageRange


def make_pulls(latency: int = 0, speed: int | None = 10**9, **keys: Any) -> Pulls:
    """A byte takes a nanosecond, hence a block a microsecond."""
    settings = {"device": False, "min_lead": 4, "in_flight": 8, **keys}
    fabric = Fabric(Network(latency), (speed, speed))
    return Pulls(fabric, settle=lambda worker, now: None, changed=lambda worker, now, by: None, **settings)


class Pair:
    """A worker that has 40 tokens in its host tier, in ten pages of a thousand bytes, and one that has nothing."""

    def __init__(self, pulls: Pulls, host: int = 100) -> None:
        self.pulls = pulls
        self.source, self.target = (Worker(tiers(host), name=name) for name in ("a", "b"))
        for at, worker in enumerate((self.source, self.target)):
            worker.offload.join(pulls, at)
        first = self.source.run("first", range(40), 0)
        self.source.offload.tick(10_000)
        self.source.finish(first, 10_000)

    def ask(self, now: int, tokens: int = 44, expected: int = 40, name: str = "r", **keys: Any) -> tuple[Request, Any]:
        """A request whose prompt begins with what the source has, and what comes of asking."""
        request = self.target.make(name, range(tokens))
        self.pulls.expect(name, PullSource("a", expected))
        return request, self.target.offload.onboard(request, self.target.manager.lookup(request), now, **keys)

    def again(self, request: Request, now: int) -> Any:
        return self.target.offload.onboard(request, self.target.manager.lookup(request), now)

    def check(self) -> None:
        self.pulls.check_integrity()
        for worker in (self.source, self.target):
            worker.offload.check_integrity()

    def land(self, now: int) -> list[Request]:
        self.pulls.fabric.land(now)
        self.check()
        return self.target.offload.tick(now)


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_a_pull_takes_the_latency_and_its_bytes_then_the_load_its_own():
    pair = Pair(make_pulls(latency=500))
    request, answer = pair.ask(20_000)
    assert answer.step is LoadStep.WAITING and answer.deadline == 20_000 + 500 + 10 * BLOCK
    assert pair.land(30_499) == []
    assert pair.land(30_500) == []
    assert pair.target.offload.tiers[0].store.used == 10
    answer = pair.again(request, 30_500)
    assert (answer.step, answer.tokens, answer.pulled) == (LoadStep.STARTED, 40, 40)
    assert answer.deadline == 30_500 + 10 * BLOCK
    assert pair.land(40_500) == [request]
    counters = pair.target.offload.counters.pulls
    assert (counters.begun, counters.landed, counters.tokens, counters.bytes) == (1, 1, 40, 10 * BLOCK)
    assert counters.ns == 10_500 and counters.queued_ns == 0
    assert not pair.pulls.expected


def test_two_pulls_from_one_worker_share_its_way_out():
    pulls = make_pulls()
    pair = Pair(pulls)
    third = Worker(tiers(100), name="c")
    third.offload.join(pulls, 2)
    pair.ask(20_000)
    other = third.make("s", range(44))
    pulls.expect("s", PullSource("a", 40))
    third.offload.onboard(other, third.manager.lookup(other), 25_000)
    # Five blocks of the first have gone. Both share the way then: ten more microseconds for its other five, and the second
    # has five left, which it sends alone.
    assert pulls.fabric.network.earliest() == 35_000
    pulls.fabric.land(35_000)
    assert pulls.fabric.network.earliest() == 40_000
    pulls.fabric.land(40_000)
    assert third.offload.tick(40_000) == [] and third.offload.counters.pulls.queued_ns == 5_000


def test_the_source_keeps_what_is_read_until_it_has_landed():
    pair = Pair(make_pulls(), host=12)
    pair.ask(20_000)
    store = pair.source.offload.tiers[0].store
    assert store.pool.free == 2, "ten pages are held"
    pair.check()
    pair.land(30_000)
    assert store.pool.free == 12


def test_blocks_in_flight_are_not_pulled_again():
    pair = Pair(make_pulls())
    first, _ = pair.ask(20_000)
    second, answer = pair.ask(21_000, name="s")
    assert answer.step is LoadStep.WAITING and pair.target.offload.counters.pulls.begun == 1
    pair.land(30_000)
    assert pair.again(first, 30_000).step is LoadStep.STARTED
    # The second waits for the first one's load, and finds all of it on the device then.
    assert pair.again(second, 30_000).step is LoadStep.WAITING


def test_a_copy_that_is_gone_costs_one_latency():
    pair = Pair(make_pulls(latency=700))
    pair.source.offload.tiers[0].store.pool.reset()
    request, answer = pair.ask(20_000)
    assert answer.step is LoadStep.WAITING and answer.deadline == 20_700
    assert pair.land(20_700) == []
    assert pair.again(request, 20_700).step is LoadStep.NOTHING
    counters = pair.target.offload.counters.pulls
    assert (counters.gone, counters.begun, counters.landed) == (1, 0, 0)


def test_a_source_that_fails_leaves_nothing_behind():
    pair = Pair(make_pulls())
    request, _ = pair.ask(20_000)
    pair.pulls.fail(0, 25_000)
    pair.check()
    assert pair.target.offload.tick(25_000) == []
    assert pair.again(request, 25_000).step is LoadStep.NOTHING
    assert pair.target.offload.counters.pulls.failed == 1
    pair.target.offload.forget(request, 25_000)
    pair.check()
    for worker in (pair.source, pair.target):
        store = worker.offload.tiers[0].store
        assert store.pool.free == store.num_pages
    assert not pair.pulls.fabric.network.in_flight


def test_a_source_that_has_failed_is_not_read_any_more():
    """Its pages may be there still, as they are here, but it doesn't answer."""
    pair = Pair(make_pulls(latency=700))
    pair.pulls.fail(0, 15_000)
    request, answer = pair.ask(20_000)
    assert answer.step is LoadStep.WAITING and answer.deadline == 20_700
    pair.land(20_700)
    assert pair.again(request, 20_700).step is LoadStep.NOTHING
    assert pair.target.offload.counters.pulls.gone == 1
    pair.pulls.back("a")
    _, answer = pair.ask(30_000, name="later")
    assert answer.step is LoadStep.WAITING and pair.target.offload.counters.pulls.begun == 1


def test_a_forecast_is_when_a_pull_lands_if_nothing_else_comes():
    pair = Pair(make_pulls(latency=500))
    pair.pulls.expect("r", PullSource("a", 40))
    request = pair.target.make("r", range(44))
    foreseen = pair.pulls.members["b"].foresee(request, 10 * BLOCK, 20_000)
    _, answer = pair.ask(20_000)
    assert foreseen == answer.deadline == 30_500


def test_a_request_that_goes_leaves_its_copy_for_others():
    pair = Pair(make_pulls())
    request, _ = pair.ask(20_000)
    pair.target.offload.forget(request, 22_000)
    assert pair.land(30_000) == []
    store = pair.target.offload.tiers[0].store
    assert store.used == 10 and store.pool.free == store.num_pages


@pytest.mark.parametrize(
    ("keys", "ask", "counted"),
    [
        ({"min_lead": 41}, {}, {}),
        ({}, {"expected": 2}, {}),
        ({"in_flight": 0}, {}, {"busy": 1}),
    ],
)
def test_prefixes_not_worth_a_pull_are_computed(keys, ask, counted):
    pair = Pair(make_pulls(**keys))
    _, answer = pair.ask(20_000, **ask)
    assert answer.step is LoadStep.NOTHING and not pair.pulls.in_flight
    counters = pair.target.offload.counters.pulls
    assert {name: getattr(counters, name) for name in ("busy", "no_room", "gone")} == {
        "busy": 0,
        "no_room": 0,
        "gone": 0,
        **counted,
    }


def test_a_host_without_room_computes():
    pair = Pair(make_pulls(), host=12)
    busy = pair.target.run("busy", range(1000, 1020), 15_000)  # five pages on their way
    _, answer = pair.ask(15_000)
    assert answer.step is LoadStep.NOTHING and pair.target.offload.counters.pulls.no_room == 1
    pair.target.offload.tick(30_000)
    pair.target.finish(busy, 30_000)
    pair.check()


# -- contents ---------------------------------------------------------------------------------------------------------


class Fleet:
    """Workers with contents that pull from each other at random; sources fail, and so do those that pull."""

    def __init__(self, groups: list[GroupSpec], seed: int, device: bool, host: int, **offload: Any) -> None:
        self.rng = Random(seed)
        self.device = device
        speed = 30 * 10**9 if "load_policy" in offload else 2 * 10**8  # else nothing would be worth it
        self.pulls = make_pulls(latency=300, speed=speed, device=device, in_flight=2)
        self.pulls.watch = self.moved
        self.engines = [TieredEngine(pool_for(groups), groups, tiers(host, **offload), name=str(at)) for at in range(3)]
        for at, engine in enumerate(self.engines):
            engine.offload.join(self.pulls, at)
        self.traffic = [TieredTraffic(engine, seed * 10 + at) for at, engine in enumerate(self.engines)]
        for at, walk in enumerate(self.traffic):
            walk.names = iter(range(at, 10**9, 3))  # of no other's request
            walk.texts = [[1000 * (text + 1) + i for i in range(8 * walk.unit)] for text in range(5)]
        self.asked: set[str] = set()
        self.now = 0

    def moved(self, pull: Pull) -> None:
        source, target = self.engines[pull.source.worker], self.engines[pull.target.worker]
        for near, far in zip(pull.copy.near, pull.copy.far, strict=True):
            pages = [page for extent in near for page in extent.ids]
            for page, read in zip(pages, [page for extent in far for page in extent.ids], strict=True):
                content = [source.memory[read]] if self.device else source.pages[Tier.G2][read]
                target.pages[Tier.G2][page] = [dict(cells) for cells in content]

    def run(self, steps: int) -> None:
        rng = self.rng
        for _ in range(steps):
            self.now += rng.choice([0, 1, rng.randint(0, 3_000)])
            self.pulls.fabric.land(self.now)
            at = rng.randrange(3)
            engine = self.engines[at]
            for name, job in engine.waiting.items():
                if name not in self.asked:
                    self.asked.add(name)
                    source = max((other for other in range(3) if other != at), key=lambda one: self.has(one, job))
                    if self.has(source, job) or rng.random() < 0.05:
                        self.pulls.expect(name, PullSource(str(source), len(job.tokens)))
            engine.manager.begin_step()
            engine.tick(self.now)
            self.traffic[at].act()
            engine.verify()
            if rng.random() < 0.01:
                failed = rng.randrange(3)
                self.pulls.fail(failed, self.now)
                self.pulls.back(str(failed))  # at once, with all that it had

    def has(self, at: int, job: Job) -> int:
        """Pages of the first group that a worker has of a prompt."""
        pages = PeerPages(self.pulls.members[str(at)].pool, 0)
        keys = self.engines[at].offload.layout.chain(job.request, 0).keys
        return sum(stop - start for start, stop in pages.resident(0, keys, len(keys)))

    def check(self) -> None:
        self.pulls.check_integrity()
        for engine in self.engines:
            engine.offload.check_integrity()

    def end(self) -> None:
        """Everything lands, and all of it is free."""
        for engine in self.engines:
            for job in list(engine.jobs.values()):
                engine.finish(job)
            for job in list(engine.waiting.values()):
                engine.offload.forget(job.request, engine.now)
        for _ in range(100):
            self.now += 100_000
            self.pulls.fabric.land(self.now)
            for engine in self.engines:
                engine.tick(self.now)
        self.check()
        for engine in self.engines:
            engine.verify()
            pool, store = engine.manager.pool, engine.offload.tiers[0].store
            assert pool.free == pool.num_blocks - 1 and store.pool.free == store.num_pages
        assert not self.pulls.in_flight

    def counted(self, name: str) -> int:
        return sum(getattr(engine.offload.counters.pulls, name) for engine in self.engines)


SETS: dict[str, tuple[list[GroupSpec], dict[str, Any]]] = {
    "full": ([FULL], {}),
    "full+window": ([FULL, NARROW], {}),
    "full+aligned": ([FULL, spec("mamba")], {}),
    "storage": ([FULL], {"storage": 300}),
    "on-eviction": ([FULL, NARROW], {"policy": "on_eviction", "offload_ahead": 6}),
    "chunks": ([FULL], {"blocks_per_chunk": 3}),
    "least-time": ([FULL], {"load_policy": "least-time"}),
}


def play(name: str, device: bool, seed: int, host: int, rounds: int) -> Fleet:
    groups, offload = SETS[name]
    fleet = Fleet(groups, seed, device, host, **offload)
    for _ in range(rounds):
        fleet.run(100)
        fleet.check()
    fleet.end()
    return fleet


@pytest.mark.parametrize(
    ("name", "device"), [("full", False), ("full+window", True), ("full+aligned", False), ("least-time", False)]
)
def test_bytes_survive_and_nothing_is_lost(name, device):
    """With preemption, cancelled requests, and workers that fail while others read from them."""
    fleet = play(name, device, 3, 2 * pool_for(SETS[name][0]), 5)
    assert fleet.counted("landed") > 3 and fleet.counted("gone"), "hardly anything was pulled"
    if name == "least-time":
        assert any(engine.offload.counters.pulls.refused for engine in fleet.engines)
    else:
        assert fleet.counted("failed") and sum(walk.done["preempted"] for walk in fleet.traffic) > 5


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SETS)
def test_for_a_long_time(name):
    for seed in range(20, 26):
        device = seed % 2 == 1 and name != "chunks"  # a device is read block by block
        fleet = play(name, device, seed, pool_for(SETS[name][0]) + 7 * (seed % 5), 30)
        assert fleet.counted("landed") > 3


@pytest.mark.source
@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_a_source_that_lets_go_too_early_is_noticed(monkeypatch, device):
    """The check above can fail: here a source may evict what is read."""
    end = Holds.end
    hold = PeerPages.hold

    def end_if_held(self: Holds, held: BlockTable) -> None:
        if held in self.tables:
            end(self, held)

    def hasty(self: PeerPages, piece: PageRange) -> BlockTable:
        return loose(self.pool, hold(self, piece))

    monkeypatch.setattr(Holds, "end", end_if_held)
    monkeypatch.setattr(PeerPages, "hold", hasty)
    with pytest.raises(Corrupted):
        for seed in range(10):
            Fleet([FULL], seed, device, pool_for([FULL]) // 2).run(600)


@pytest.mark.source
@pytest.mark.parametrize(
    ("landing", "pulled", "first"), [(10, 20, 10), (10, 5, 5), (None, 20, 20), (10, None, 10), (None, None, None)]
)
def test_the_next_deadline_is_that_of_what_lands_first(
    landing: int | None, pulled: int | None, first: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "next_landing", lambda tiers: landing)
    peers = SimpleNamespace(incoming=True, earliest=lambda: pulled)
    made = SimpleNamespace(state=SimpleNamespace(inbox=[], peers=peers), _shared=[], tiers=[])
    assert offload.Offload.earliest_deadline(made) == first  # type: ignore[arg-type]
