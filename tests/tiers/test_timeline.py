"""What is shared: one store, one link, one stream of events, seen by every worker at the right time and not before."""

from __future__ import annotations

import multiprocessing
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
from tests.blocks.content import pool_for
from tests.blocks.support import FULL
from tests.tiers.content import Page, TieredEngine, TieredTraffic
from tests.tiers.support import BLOCK, Worker, link, tiers

from kvyard.blocks import BlockManager, GroupSpec
from kvyard.blocks.spec import ConfigError
from kvyard.clock import ClockError
from kvyard.errors import KvyardError
from kvyard.events import Batcher, Mirror
from kvyard.events.tier import LOWER_TIERS
from kvyard.events.types import GroupMeta, Stored, Tier
from kvyard.tiers import Copy, LoadStep, Offload, OffloadConfig, Timeline
from kvyard.tiers.links import LaneConfig, LinkConfig

SHARED = {"scope": "shared"}


def shared_storage(**keys: Any) -> OffloadConfig:
    return tiers(host=20, storage=100, storage_keys={**SHARED, "link": link(discipline="fair")}, **keys)


class Fleet:
    """Workers on one time line, and a reader of its events."""

    def __init__(self, config: OffloadConfig, count: int = 2, num_blocks: int = 50) -> None:
        self.batcher = Batcher([GroupMeta(block_size=4)], stream="pool")
        self.timeline = Timeline(self.batcher)
        self.mirror = Mirror()
        self.stored: list[Stored] = []
        self.workers = [Worker(config, num_blocks, name=f"w{at}", timeline=self.timeline) for at in range(count)]

    def until(self, now: int) -> None:
        """Everything that lands up to ``now``, in order of time."""
        while True:
            times = [at for worker in self.workers if (at := worker.offload.earliest_deadline()) is not None]
            if not times or min(times) > now:
                break
            for worker in self.workers:
                worker.tick(min(times))
            self.check()

    def check(self) -> None:
        self.timeline.check_integrity()
        batch = self.batcher.end_iteration(0)
        if batch is not None:
            self.stored += [event for event in batch.events if isinstance(event, Stored)]
            self.mirror.apply(batch.events)
        assert not self.mirror.repeated and not self.mirror.unknown
        held = {}
        for tier in LOWER_TIERS:
            shared = self.timeline.tiers.get(tier)
            keys = {key for _, key, _ in shared.store.pool.cached_blocks()} if shared is not None else set()
            if keys:
                held[0, tier] = keys
        assert self.mirror.held == held


def test_storage_is_seen_by_others_when_it_has_landed_and_not_before() -> None:
    fleet = Fleet(shared_storage())
    one, two = fleet.workers
    one.finish(one.run("a", range(41), now=0), 0)
    fleet.until(19_999)  # in the first one's host since 10,000, on its way to storage
    assert two.onboard(two.make("early", range(41)), 19_999).step is LoadStep.NOTHING
    fleet.until(20_000)
    late = two.make("late", range(41))
    assert two.onboard(late, 20_000).step is LoadStep.WAITING  # fetched into its own host first
    fleet.until(30_000)
    started = two.onboard(late, 30_000)
    assert (started.step, started.tokens, started.by_tier) == (LoadStep.STARTED, 40, (0, 40))
    fleet.until(40_000)
    assert late.num_computed_tokens == 40
    assert two.offload.counters.cross_worker_blocks == 10
    assert two.held(Tier.G2) == 10 and one.held(Tier.G2) == 10


def test_a_shared_tier_announces_once() -> None:
    fleet = Fleet(shared_storage())
    for worker in fleet.workers:
        worker.run("a", range(41), now=0)
    fleet.until(10**9)
    assert [(len(event.hashes), event.tier) for event in fleet.stored] == [(10, Tier.G3)]
    assert (
        fleet.workers[0].offload.counters.tiers[1].stores.blocks
        + fleet.workers[1].offload.counters.tiers[1].stores.blocks
        == 10
    )
    # And the workers announce their own tiers, but not this one.
    assert all(event.tier is not Tier.G3 for worker in fleet.workers for event in worker.events)


def test_workers_contend_for_a_shared_link() -> None:
    ends = []
    for count in (1, 2):
        fleet = Fleet(shared_storage(), count)
        for at, worker in enumerate(fleet.workers):
            worker.run("a", range(100 * at, 100 * at + 41), now=0)
        fleet.until(10**9)
        ends.append(max(worker.offload.counters.tiers[1].stores.queued_ns for worker in fleet.workers))
    assert ends == [0, 10_000]


def test_a_client_has_its_own_cap() -> None:
    lane = LaneConfig(bandwidth=10**9, client_bandwidth=5 * 10**8)
    config = tiers(20, 100, storage_keys={**SHARED, "link": LinkConfig(outward=lane, inward=lane)})
    fleet = Fleet(config)
    fleet.workers[0].run("a", range(41), now=0)
    fleet.until(29_999)
    assert not fleet.stored
    fleet.until(30_000)
    assert len(fleet.stored) == 1


def test_a_shared_host_serves_everybody() -> None:
    fleet = Fleet(tiers(100, host_keys=SHARED))
    one, two = fleet.workers
    one.finish(one.run("a", range(41), now=0), 0)
    wait = two.onboard(two.make("early", range(41)), 5_000)
    assert (wait.step, wait.deadline) == (LoadStep.WAITING, 10_000)  # on its way: nobody computes it meanwhile
    fleet.until(10_000)
    request = two.make("late", range(41))
    assert two.onboard(request, 10_000).step is LoadStep.STARTED
    fleet.until(20_000)
    assert request.num_computed_tokens == 40 and two.offload.counters.cross_worker_blocks == 10
    assert [(len(event.hashes), event.tier) for event in fleet.stored] == [(10, Tier.G2)]


def test_blocks_stored_by_one_worker_are_not_stored_again() -> None:
    fleet = Fleet(tiers(100, host_keys=SHARED))
    for at, worker in enumerate(fleet.workers):
        worker.run("a", range(41), now=at)  # the second while the first's is on its way
    fleet.until(10**9)
    assert [worker.offload.counters.tiers[0].stores.blocks for worker in fleet.workers] == [10, 0]


def test_a_landing_that_another_let_pass_is_still_delivered() -> None:
    """The second worker ticks first; the first hears of its own landing when it does."""
    fleet = Fleet(tiers(100, host_keys=SHARED))
    one, two = fleet.workers
    one.finish(one.run("a", range(41), now=0), 0)
    two.tick(12_000)
    assert one.manager.pool.free == 39 and one.offload.earliest_deadline() == 10_000
    one.tick(12_000)
    assert one.manager.pool.free == 49 and one.offload.earliest_deadline() is None


def test_a_worker_waiting_for_a_copy_is_woken_though_the_copier_ticks_first() -> None:
    fleet = Fleet(tiers(100, host_keys=SHARED))
    one, two = fleet.workers
    one.run("a", range(41), now=0)
    request = two.make("b", range(41))
    assert two.onboard(request, 1_000).step is LoadStep.WAITING
    one.tick(10_000)
    assert two.offload.earliest_deadline() == 10_000
    assert two.tick(10_000) == [] and two.offload.earliest_deadline() is None
    assert two.onboard(request, 10_000).step is LoadStep.STARTED


@pytest.mark.parametrize("first", [0, 1])
def test_a_worker_waiting_for_anothers_fetch_is_woken_too(first: int) -> None:
    fleet = Fleet(tiers(12, 100, host_keys=SHARED, storage_keys=SHARED))
    one, two = fleet.workers
    for at, text in enumerate((0, 100)):
        one.finish(one.run(f"r{at}", range(text, text + 41), now=50_000 * at), 50_000 * at)
        fleet.until(50_000 * at + 40_000)
    one.evict_all()
    requests = [worker.make("again", range(41)) for worker in fleet.workers]
    for worker, request in zip(fleet.workers, requests, strict=True):
        assert worker.onboard(request, 100_000).step is LoadStep.WAITING
    assert one.offload.counters.tiers[1].loads.submitted + two.offload.counters.tiers[1].loads.submitted == 1
    landing = fleet.timeline.earliest()
    assert landing is not None
    order = fleet.workers if first == 0 else fleet.workers[::-1]
    for worker in order:
        worker.tick(landing)
    for worker, request in zip(fleet.workers, requests, strict=True):
        assert worker.onboard(request, landing).step is LoadStep.STARTED


def test_a_waiting_member_is_notified_of_room_freed_by_another() -> None:
    fleet = Fleet(tiers(12, host_keys=SHARED))
    one, two = fleet.workers
    one.run("a", range(41), now=0)
    two.run("b", range(100, 141), now=1_000)
    assert two.offload.counters.tiers[0].no_room == 1
    one.tick(10_000)
    two.tick(10_000)
    assert two.offload.counters.tiers[0].stores.submitted == 1


@pytest.mark.parametrize("first", [0, 1])
def test_the_order_of_ticks_decides_nothing(first: int) -> None:
    """A store lands in the middle of a pass: it goes on to storage then, whether its worker has heard of it or not."""
    fleet = Fleet(shared_storage(offload_batch_size=5))
    one, two = fleet.workers
    one.run("a", range(41), now=0)
    order = [one, two] if first == 0 else [two, one]
    for worker, now in zip(order, (12_000, 13_000), strict=True):
        worker.tick(now)
    two.run("b", range(100, 141), now=13_000)
    fleet.until(10**9)
    counters = [worker.offload.counters for worker in fleet.workers]
    # Batches of five land in the host at 5,000 and 10,000, and in storage at 10,000 and 15,000: never two at a time.
    assert [(c.tiers[1].stores.landed, c.tiers[1].stores.queued_ns) for c in counters] == [(2, 0), (2, 0)]
    assert sum(len(event.hashes) for event in fleet.stored) == 20


def test_the_worker_sees_its_own_side_when_it_ticks() -> None:
    fleet = Fleet(shared_storage())
    one, two = fleet.workers
    one.finish(one.run("a", range(41), now=0), 0)
    two.tick(25_000)
    assert len(fleet.timeline.tiers.get(Tier.G3).store.pool.maps[0].starts) == 1  # type: ignore[union-attr]
    assert (one.held(Tier.G2), one.manager.pool.free, one.offload.earliest_deadline()) == (0, 39, 10_000)
    one.tick(25_000)
    assert (one.held(Tier.G2), one.manager.pool.free, one.offload.earliest_deadline()) == (10, 49, None)


def test_the_time_line_can_be_advanced_by_itself() -> None:
    fleet = Fleet(tiers(100, host_keys=SHARED))
    fleet.workers[0].run("a", range(41), now=0)
    assert fleet.timeline.earliest() == 10_000
    assert not fleet.timeline.advance(9_999) and fleet.timeline.advance(10_000)
    fleet.check()
    assert len(fleet.stored) == 1 and fleet.timeline.earliest() is None
    assert fleet.timeline.members == ["w0", "w1"]


def test_time_does_not_run_backwards() -> None:
    fleet = Fleet(tiers(100, host_keys=SHARED))
    one, two = fleet.workers
    one.run("a", range(41), now=10_000)
    with pytest.raises(ClockError):
        fleet.timeline.tiers.get(Tier.G2).link.advance(5_000)  # type: ignore[union-attr]
    two.tick(5_000)  # late, but nothing to do
    two.run("b", range(100, 141), now=5_000)  # taken at the time the link is at
    fleet.until(29_999)
    assert len(fleet.stored) == 1
    fleet.until(30_000)
    assert len(fleet.stored) == 2


# -- joining ----------------------------------------------------------------------------------------------------------


def joiner(timeline: Timeline, name: str = "w1", config: OffloadConfig | None = None, **keys: Any) -> Offload:
    groups = keys.pop("groups", [GroupSpec(block_size=4)])
    return Offload(
        BlockManager(50, groups, **keys.pop("manager", {})),
        config or shared_storage(),
        **{"block_bytes": BLOCK, "name": name, "timeline": timeline, **keys},
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "w0"}, "needs a name of its own, and 'w0' is taken"),
        ({"name": ""}, "taken or empty"),
        ({"block_bytes": 999}, "w1 can't share a tier with w0: block_bytes is 999 here and 1000 there"),
        ({"groups": [GroupSpec(block_size=8)]}, "w1 can't share a tier with w0: groups is"),
        ({"groups": [GroupSpec(block_size=4), GroupSpec(block_size=4, kind="mamba")]}, "groups is"),
        ({"config": shared_storage(blocks_per_chunk=2)}, "blocks_per_chunk is 2 here and 1 there"),
        ({"config": tiers(host_keys=SHARED)}, "w1 shares G2, but w0 shares G3"),
        ({"config": tiers(20, 99, storage_keys=SHARED)}, "configure their shared G3 differently"),
    ],
)
def test_members_that_differ_are_refused(keys: dict[str, Any], message: str) -> None:
    timeline = Timeline()
    joiner(timeline, "w0")
    with pytest.raises(ConfigError, match=message):
        joiner(timeline, **keys)
    assert timeline.members == ["w0"]
    joiner(timeline, "w1")


def test_a_worker_whose_own_tiers_cannot_be_joins_nobody() -> None:
    timeline = Timeline()
    with pytest.raises(ConfigError, match="doesn't hold a single chunk"):
        joiner(timeline, config=tiers(1, 100, storage_keys=SHARED, blocks_per_chunk=2))
    assert timeline.members == []


def test_a_time_line_does_not_leave_its_process() -> None:
    with pytest.raises(KvyardError, match="a shared tier lives in one process"):
        pickle.dumps(Timeline())


def _join_elsewhere(timeline: Timeline, queue: Any) -> None:
    try:
        joiner(timeline)
    except KvyardError as error:
        queue.put(str(error))
    else:
        queue.put("joined")


def test_nor_by_forking() -> None:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=_join_elsewhere, args=(Timeline(), queue))
    process.start()
    assert queue.get() == "a shared tier lives in one process: run the workers that share it in the same one"
    process.join()


# -- contents ---------------------------------------------------------------------------------------------------------

CONFIGS: dict[str, Callable[[], OffloadConfig]] = {
    "storage": lambda: tiers(40, 200, storage_keys={**SHARED, "link": link(discipline="fair")}),
    "host": lambda: tiers(80, host_keys=SHARED),
    "both": lambda: tiers(60, 200, host_keys=SHARED, storage_keys=SHARED, offload_batch_size=4),
    "tight": lambda: tiers(24, 60, host_keys=SHARED, storage_keys=SHARED, policy="write_through_generated"),
    "remote": lambda: tiers(30, 60, 200, remote_keys={**SHARED, "link": link(discipline="fair")}),
    "all four": lambda: tiers(24, 40, 120, host_keys=SHARED, storage_keys=SHARED, remote_keys=SHARED),
    "write-back": lambda: tiers(10, 200, storage_keys=SHARED, spill="on_eviction"),
    "write-back, shared": lambda: tiers(
        24, 60, 200, host_keys=SHARED, storage_keys=SHARED, remote_keys=SHARED, spill="on_eviction"
    ),
    "late": lambda: tiers(60, 100, host_keys=SHARED, storage_keys=SHARED, policy="on_eviction", offload_ahead=7),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("groups", [[FULL], [FULL, GroupSpec(kind="sliding_window", window=10, block_size=4)]], ids=len)
@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_survive_between_workers(name: str, groups: list[GroupSpec], seed: int) -> None:
    timeline = Timeline()
    pages: dict[Tier, dict[int, Page]] = {}
    config = CONFIGS[name]()
    for tier, wanted in config.levels:
        if wanted.scope == "shared":
            pages[tier] = {}
    engines = {
        worker: TieredEngine(pool_for(groups), groups, config, name=worker, timeline=timeline, pages=pages)
        for worker in ("w0", "w1", "w2")
    }

    def moved(copy: Copy) -> None:
        engines[copy.worker].moved(copy)

    for tier in pages:
        timeline.tiers.get(tier).watch = moved  # type: ignore[union-attr]
    texts: dict[Any, Any] = {}
    rng = random.Random(seed)
    walks = []
    for at, engine in enumerate(engines.values()):
        engine.texts = texts  # hashes mean the same to all of them
        walks.append(TieredTraffic(engine, 10 * seed + at))
    now = 0
    for _ in range(500):
        now += rng.choice([0, 1, rng.randint(0, 2_000)])
        for walk in walks:
            walk.tiered.manager.begin_step()
            walk.tiered.tick(now)
        walk = rng.choice(walks)
        walk.act()
        walk.tiered.verify()
        walk.tiered.offload.check_integrity()
        timeline.check_integrity()
    for engine in engines.values():
        for job in list(engine.jobs.values()):
            engine.finish(job)
        for job in list(engine.waiting.values()):
            engine.offload.forget(job.request, now)
    while times := [at for e in engines.values() if (at := e.offload.earliest_deadline()) is not None]:
        for engine in engines.values():
            engine.tick(min(times))
    for engine in engines.values():
        engine.verify()
        engine.offload.check_integrity()
        assert engine.manager.pool.free == engine.manager.pool.num_blocks - 1, "a device lost blocks"
        for tier in engine.offload.tiers:
            assert tier.store.pool.free == tier.store.num_pages, f"{tier.store.tier.name} lost pages"
    assert sum(engine.offload.counters.tiers[0].loads.landed for engine in engines.values()) > 3
    assert sum(engine.offload.counters.cross_worker_blocks for engine in engines.values()) > 3


# -- a worker that fails ----------------------------------------------------------------------------------------------


def test_a_failed_worker_leaves_nothing_behind_in_a_shared_host() -> None:
    """It fails while a fetch is under way, for which it keeps pages of the host, and while batches of a store wait."""
    config = tiers(20, 100, host_keys=SHARED, storage_keys={**SHARED, "link": link(10**8)}, offload_batch_size=2)
    fleet = Fleet(config)
    one, two = fleet.workers
    one.finish(one.run("a", range(41), now=0), 0)
    fleet.until(1_000_000)
    two.finish(two.run("b", range(1000, 1061), now=1_000_000), 1_000_000)  # pushes the tail of it out of the host
    fleet.until(10_000_000)
    one.evict_all()
    again = one.make("again", range(41))
    assert one.onboard(again, 10_000_000).step is LoadStep.WAITING and one.offload.state.requests[again].keep
    running = one.make("c", range(2000, 2017))
    one.compute(running, 10_000_000)
    store = fleet.timeline.tiers.get(Tier.G2).store
    assert one.offload.counters.tiers[0].stores.submitted - one.offload.counters.tiers[0].stores.landed == 1
    assert store.pool.free < 20 and any(copy.rest for copy in fleet.timeline.tiers.get(Tier.G2).in_flight.values())
    submitted = one.offload.counters.tiers[0].stores.submitted
    one.offload.close(10_000_000)
    one.offload.check_integrity()
    while (at := fleet.timeline.earliest()) is not None:
        fleet.timeline.advance(at)
    fleet.timeline.check_integrity()
    assert store.pool.free == 20 and not store.pool.holds.tables and not store.reserved
    assert one.offload.counters.tiers[0].stores.submitted == submitted
    late = two.make("late", range(41))
    assert two.onboard(late, 10**9).step is LoadStep.STARTED  # what was under way landed, for whoever wants it
