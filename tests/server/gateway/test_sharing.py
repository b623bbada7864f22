"""Gateways that share a view: real routers, a real Redis, and whatever may happen to either."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import eventually_async

pytest.importorskip("redis", reason="needs kvyard[redis]")

from tests.index.redis.server import RedisServer, run_redis
from tests.router.support import chain, index_for

from kvyard.clock import WallClock
from kvyard.errors import KvyardError
from kvyard.index import Holder
from kvyard.router import Router, RouterConfig, RouteRequest
from kvyard.server.gateway.sharing import LoadSharing, load_sharing, peers

pytestmark = pytest.mark.redis
PATIENCE = 40.0
SLOW = 20.0
_numbers = itertools.count()


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from run_redis(tmp_path_factory.mktemp("redis"))


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    yield from run_redis(tmp_path)


def fresh() -> str:
    return f"test-{os.getpid()}-{next(_numbers)}"


class Gateway:
    """A router and its part in the common view."""

    def __init__(
        self, server: RedisServer, namespace: str, name: str, workers: tuple[str, ...] = ("a", "b"), **options: Any
    ) -> None:
        self.clock = WallClock()
        config = RouterConfig(policy="kv", predicted_ttl_s=600)
        self.router = Router(config, workers, index_for(workers))
        options = {"lease_s": 60.0, "timeout_s": SLOW, "beat_s": 0.02, "identity": "blocks of 4", **options}
        url = options.pop("url", server.url)
        self.sharing = LoadSharing(url, self.router, clock=self.clock, namespace=namespace, gateway=name, **options)

    def send(self, id_: str, prompt: str, worker: str | None = None) -> Holder:
        keys = chain(prompt)
        exclude = [holder for holder in self.router.workers if worker is not None and holder.name != worker]
        request = RouteRequest(id_, keys, 4 * len(keys) + 1)
        decision = self.router.route(request, self.clock.now(), exclude=exclude)
        self.sharing.routed(request, decision.worker, decision.new_tokens)
        return decision.worker

    def end(self, id_: str) -> None:
        self.router.finished(id_, self.clock.now())
        self.sharing.finished(id_)

    def load(self, worker: str) -> tuple[int, int, int]:
        load = self.router.load(Holder(worker))
        return load.prefill_tokens, load.blocks, load.requests


def live(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(100):
            await story()

    asyncio.run(bounded())


async def until(true: Callable[[], bool], what: Callable[[], object] = lambda: "") -> float:
    start = time.monotonic()
    await eventually_async(true, what)
    return time.monotonic() - start


@contextlib.asynccontextmanager
async def running(*gateways: Gateway) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(gateway.sharing.run()) for gateway in gateways]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for gateway in gateways:
            gateway.router.check_integrity()


async def beats(*gateways: Gateway, times: int = 1) -> None:
    for _ in range(times):
        for gateway in gateways:
            await gateway.sharing.beat()


def test_load_and_prefixes_of_one_are_known_to_the_other(redis: RedisServer) -> None:
    async def story() -> None:
        space = fresh()
        one, two = Gateway(redis, space, "one"), Gateway(redis, space, "two")
        await beats(one, two, times=2)
        assert one.sharing.peers == {"two": 0} and two.sharing.peers == {"one": 0}
        one.send("r", "hello world", "a")
        assert two.load("a") == (0, 0, 0)
        await beats(one, two)
        assert two.load("a") == one.load("a") == (45, 11, 1)
        assert two.sharing.peers == {"one": 1}
        # What one sent to a is there soon, though no event told of it: two counts on it as well.
        decision = two.router.route(RouteRequest("s", chain("hello world"), 45), two.clock.now(), detail=True)
        assert [(seen.worker.name, seen.predicted) for seen in decision.candidates] == [("a", 11), ("b", 0)]
        two.router.finished("s", two.clock.now())
        one.router.prefill_done("r", one.clock.now())
        one.sharing.prefill_done("r")
        await beats(one, two)
        assert two.load("a") == one.load("a") == (0, 11, 1)
        one.end("r")
        await beats(one, two)
        assert two.load("a") == one.load("a") == (0, 0, 0)
        assert two.sharing.peers == {"one": 0}
        # One that ends without a first token was refused: neither of them counts on it any longer.
        one.send("t", "quite another prompt", "a")
        await beats(one, two)
        one.router.refused("t", one.clock.now())
        one.sharing.finished("t")
        await beats(one, two)
        for gateway in (one, two):
            seen = gateway.router.preview(RouteRequest("u", chain("quite another prompt"), 80), gateway.clock.now())
            assert [one.predicted for one in seen.candidates] == [0, 0]

    live(story)


def test_together_they_spread_load_as_one_would(redis: RedisServer) -> None:
    async def story() -> None:
        space = fresh()
        workers = ("a", "b", "c", "d")
        gateways = [Gateway(redis, space, str(number), workers) for number in range(3)]
        await beats(*gateways, times=2)
        for number in range(24):
            gateway = gateways[number % 3]
            gateway.send(f"r{number}", f"{number:08d}" * 4)
            await beats(*gateways, times=2)
        for gateway in gateways:
            assert [gateway.load(worker)[2] for worker in workers] == [6, 6, 6, 6]

    live(story)


def test_a_late_gateway_learns_of_requests_in_flight(redis: RedisServer) -> None:
    async def story() -> None:
        space = fresh()
        one = Gateway(redis, space, "one")
        await beats(one, times=2)
        one.send("x", "gone by then", "a")
        one.send("y", "under way", "a")
        one.send("z", "first token seen", "b")
        one.end("x")
        one.router.prefill_done("z", one.clock.now())
        one.sharing.prefill_done("z")
        await beats(one, times=3)
        two = Gateway(redis, space, "two")
        await beats(two, one, one, two, times=2)
        for worker in ("a", "b"):
            assert two.load(worker) == one.load(worker)
        assert two.load("a")[2] == 1 and two.load("b") == (0, 16, 1)
        # The first one was told nothing twice.
        one.end("y")
        await beats(one, two)
        assert two.load("a") == (0, 0, 0)

    live(story)


def test_a_retry_under_the_same_name_moves_the_load(redis: RedisServer) -> None:
    async def story() -> None:
        space = fresh()
        one, two = Gateway(redis, space, "one"), Gateway(redis, space, "two")
        await beats(one, two, times=2)
        one.send("r", "again", "a")
        await beats(one, two)
        one.router.finished("r", one.clock.now())
        one.send("r", "again", "b")
        await beats(one, two)
        assert two.load("a")[2] == 0 and two.load("b")[2] == 1

    live(story)


def test_a_worker_that_only_one_of_them_knows_yet(redis: RedisServer) -> None:
    async def story() -> None:
        space = fresh()
        one, two = Gateway(redis, space, "one", ("a", "new")), Gateway(redis, space, "two", ("a",))
        await beats(one, two, times=2)
        one.send("r", "where is it", "new")
        await beats(one, two)
        assert two.sharing.counters.unknown_workers == 1 and two.sharing.peers == {"one": 1}
        two.router.add_worker("new")
        two.sharing.worker_added(Holder("new"))
        assert two.load("new") == one.load("new")
        # It goes and comes back: what the other has there counts again.
        two.router.remove_worker("new")
        two.router.add_worker("new")
        two.sharing.worker_added(Holder("new"))
        assert two.load("new") == one.load("new")
        one.end("r")
        await beats(one, two)
        assert two.load("new") == (0, 0, 0)

    live(story)


def test_one_that_leaves_and_one_that_dies_take_their_load_along(redis: RedisServer) -> None:
    async def story() -> None:
        space = fresh()
        one, leaves = Gateway(redis, space, "one"), Gateway(redis, space, "leaves")
        dies = Gateway(redis, space, "dies", lease_s=0.3)
        async with running(one):
            async with running(leaves):
                await until(lambda: one.sharing.peers.keys() == {"leaves"})
                leaves.send("r", "politely", "a")
                await until(lambda: one.load("a")[2] == 1)
            await until(lambda: one.load("a")[2] == 0)
            await beats(dies, times=2)
            dies.send("r", "without a word", "a")
            await beats(dies)
            # It says nothing more.
            await until(lambda: one.load("a")[2] == 1 or one.sharing.counters.expired >= 2)
            await until(lambda: one.load("a")[2] == 0)
            assert one.sharing.peers == {}
            # It had only slept: all is told again.
            async with running(dies):
                await until(lambda: one.load("a")[2] == 1)
            assert dies.sharing.counters.joins >= 2

    live(story)


def test_a_server_that_dies_and_comes_back_empty(own_redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvyard.server.gateway.sharing")

    async def story() -> None:
        space = fresh()
        options = {"lease_s": 0.5, "timeout_s": 0.5}
        one, two = Gateway(own_redis, space, "one", **options), Gateway(own_redis, space, "two", **options)
        async with running(one, two):
            one.send("before", "before", "a")
            await until(lambda: two.load("a")[2] == 1)
            own_redis.kill()
            await until(lambda: not one.sharing.connected and not two.sharing.connected)
            # Routing goes on; after a lease each goes by its own view.
            await until(lambda: two.load("a")[2] == 0)
            one.end("before")
            one.send("meanwhile", "meanwhile", "b")
            two.send("too", "too", "b")
            assert one.load("b")[2] == two.load("b")[2] == 1
            own_redis.start()
            await until(lambda: one.load("b")[2] == two.load("b")[2] == 2)
            assert one.load("a")[2] == two.load("a")[2] == 0
            await until(lambda: one.sharing.connected and one.sharing.reason == "")
            # All is as before: an end is heard of.
            one.end("meanwhile")
            await until(lambda: two.load("b")[2] == 1)
            assert one.sharing.counters.outages >= 1 and one.sharing.counters.failures >= 1
            outages.append(one.sharing.counters.outages + two.sharing.counters.outages)

    outages: list[int] = []
    live(story)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert 2 <= len(said) <= outages[0] + 2 and all("its own view" in line for line in said)  # not with every beat
    assert [record for record in caplog.records if "shared again" in record.getMessage()]


def test_a_server_that_is_emptied_or_frozen(own_redis: RedisServer) -> None:
    async def story() -> None:
        space = fresh()
        options = {"lease_s": 0.5, "timeout_s": 0.2}
        one, two = Gateway(own_redis, space, "one", **options), Gateway(own_redis, space, "two", **options)
        async with running(one, two):
            one.send("r", "stays", "a")
            await until(lambda: two.load("a")[2] == 1)
            for command in (("FLUSHALL",), ("SCRIPT", "FLUSH")):
                joins = two.sharing.counters.joins
                assert own_redis.ask(*command).startswith("+OK")
                await until(lambda joins=joins: two.sharing.counters.joins > joins)  # type: ignore[misc]
                await until(lambda: two.load("a")[2] == 1)
            own_redis.pause()
            await until(lambda: not two.sharing.connected)
            start = time.monotonic()
            two.send("quick", "doesn't wait", "b")
            for number in range(100):
                two.send(f"quick {number}", "doesn't wait", "b")
                two.end(f"quick {number}")
                await asyncio.sleep(0)
            assert time.monotonic() - start < 18  # if each waited for the server's time-out: 20 s
            own_redis.resume()
            await until(lambda: one.load("b")[2] == 1 and two.load("a")[2] == 1)

    live(story)


def test_a_server_that_isnt_there_yet_is_waited_for_and_a_wrong_one_is_refused(own_redis: RedisServer) -> None:
    async def story() -> None:
        space = fresh()
        own_redis.kill()
        early = Gateway(own_redis, space, "early", timeout_s=0.5)
        await early.sharing.start()
        assert not early.sharing.connected and early.sharing.reason
        early.send("r", "alone", "a")
        own_redis.start("--requirepass", "secret")
        wrong = Gateway(own_redis, space, "wrong", url=own_redis.url.replace("//", "//:guess@"))
        with pytest.raises(KvyardError, match="can't share load through redis://127"):
            await wrong.sharing.start()
        right = own_redis.url.replace("//", "//:secret@")
        one = Gateway(own_redis, space, "one", url=right)
        await one.sharing.start()
        assert one.sharing.connected
        other = Gateway(own_redis, space, "other", url=right, identity="blocks of 16")
        with pytest.raises(KvyardError, match=r"name blocks otherwise \(blocks of 4, not blocks of 16\)"):
            await other.sharing.start()
        elsewhere = Gateway(own_redis, fresh(), "other", url=right, identity="blocks of 16")
        await elsewhere.sharing.start()
        assert elsewhere.sharing.peers == {}

    live(story)


def test_much_at_once_goes_in_portions_and_a_backlog_is_bounded(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_sharing, "PORTION", 1000)
    monkeypatch.setattr(load_sharing, "HEARD", 4)

    async def story() -> None:
        space = fresh()
        one, two = Gateway(redis, space, "one"), Gateway(redis, space, "two")
        async with running(one, two):
            await until(lambda: one.sharing.peers == {"two": 0} and two.sharing.peers == {"one": 0})
            for number in range(300):
                one.send(f"r{number}", f"{number:020d}", "a")
            await until(lambda: two.load("a") == one.load("a"), lambda: two.load("a"))
            for number in range(300):
                one.end(f"r{number}")
            await until(lambda: two.load("a") == (0, 0, 0))
            assert one.sharing.counters.sent == two.sharing.counters.received == 600
        monkeypatch.setattr(load_sharing, "BACKLOG", 2000)
        three, four = Gateway(redis, space, "three"), Gateway(redis, space, "four")
        await beats(three, four, times=2)
        for number in range(300):
            three.send(f"r{number}", f"{number:020d}", "a")
        assert len(three.sharing._outbox) < 20
        async with running(three, four):
            await until(lambda: four.load("a") == three.load("a"))
        assert three.sharing.counters.joins == 2

    live(story)


def test_a_beat_sends_about_a_mebibyte_at_most(redis: RedisServer) -> None:
    """More would keep the server, which does one thing at a time, from the beats of others."""

    async def story() -> None:
        one = Gateway(redis, fresh(), "one")
        await beats(one)
        keys = list(range(1000))
        size = 64 + 8 * len(keys)
        for number in range(200):
            one.sharing.routed(RouteRequest(f"r{number}", keys, 4 * len(keys)), Holder("a"), 0)
        await beats(one)
        assert 1 << 20 <= one.sharing.counters.sent * size < (1 << 20) + size
        await beats(one)
        assert one.sharing.counters.sent == 200

    live(story)


def test_unreadable_or_excessive_messages_are_counted(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MOST", 3)

    async def story() -> None:
        space = fresh()
        one, two = Gateway(redis, space, "one"), Gateway(redis, space, "two")
        await beats(one, two, times=2)
        number = redis.ask("HGET", f"kvyard:share1:{space}:who", "one").split("\r\n")[1]
        redis.ask("XADD", f"kvyard:share1:{space}:log", "*", "g", "one", "n", number, "d", "nonsense")
        for request in range(5):
            one.send(f"r{request}", f"r{request}", "a")
        await beats(one, two)
        assert two.sharing.counters.garbled == 1 and two.sharing.counters.dropped == 2
        assert two.load("a")[2] == 3
        for request in range(5):
            one.end(f"r{request}")
        await beats(one, two)
        assert two.load("a")[2] == 0

    live(story)


def test_a_beat_is_one_round_trip_and_nothing_stays_behind(redis: RedisServer) -> None:
    async def story() -> None:
        space = fresh()
        one, two = Gateway(redis, space, "one", lease_s=0.2), Gateway(redis, space, "two", lease_s=0.2)
        await beats(one, two, times=2)
        one.send("r", "x", "a")
        before, joins = one.sharing._server.round_trips, one.sharing.counters.joins
        await beats(one, times=5)
        # Where the machine was busy for longer than the lease, it has joined again.
        assert one.sharing._server.round_trips - before == 5 + 3 * (one.sharing.counters.joins - joins)
        # The server forgets all of it by itself, twenty leases after the last beat at most.
        names = [name for name in redis.ask("KEYS", f"kvyard:share1:{space}*").split() if name.startswith("kvyard:")]
        left = [int(redis.ask("PTTL", name).removeprefix(":")) for name in names]
        assert left and all(0 <= ms <= 20 * 200 for ms in left), dict(zip(names, left, strict=True))

    live(story)


def test_figures_that_cant_be(redis: RedisServer) -> None:
    with pytest.raises(KvyardError, match="three at least"):
        Gateway(redis, fresh(), "x", beat_s=1.0, lease_s=2.0)
    with pytest.raises(KvyardError, match="no address"):
        Gateway(redis, fresh(), "x", url="http://localhost")


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_all_views_end_up_the_same(redis: RedisServer, seed: int) -> None:
    """A random walk: requests come and go, gateways join, sleep and leave, the server loses everything."""
    rng = random.Random(seed)

    async def story() -> None:
        space = fresh()
        workers = ("a", "b", "c")
        gateways = {name: Gateway(redis, space, name, workers) for name in ("one", "two")}
        under_way: list[tuple[str, str]] = []
        count = itertools.count()
        for _ in range(250):
            name = rng.choice(list(gateways))
            gateway = gateways[name]
            deed = rng.random()
            mine = [id_ for owner, id_ in under_way if owner == name]
            if deed < 0.35:
                id_ = f"r{next(count)}"
                gateway.send(id_, "".join(rng.choices("ab", k=rng.randrange(1, 9))), rng.choice(workers))
                under_way.append((name, id_))
            elif deed < 0.45 and mine:
                id_ = rng.choice(mine)
                gateway.router.prefill_done(id_, gateway.clock.now())
                gateway.sharing.prefill_done(id_)
            elif deed < 0.6 and mine:
                id_ = rng.choice(mine)
                gateway.end(id_)
                under_way.remove((name, id_))
            elif deed < 0.63 and len(gateways) < 5:
                joined = f"late{next(count)}"
                gateways[joined] = Gateway(redis, space, joined, workers)
            elif deed < 0.66 and len(gateways) > 2:
                gateway.sharing._leave()
                del gateways[name]
                under_way = [entry for entry in under_way if entry[0] != name]
            elif deed < 0.68:
                redis.ask("DEL", *(f"kvyard:share1:{space}{part}" for part in ("", ":who", ":until", ":log")))
            elif deed < 0.70:  # it slept through its lease
                redis.ask("ZADD", f"kvyard:share1:{space}:until", "XX", "1", name)
            else:
                await gateway.sharing.beat()
        await beats(*gateways.values(), times=5)
        views = [[gateway.load(worker) for worker in workers] for gateway in gateways.values()]
        assert all(view == views[0] for view in views), views
        assert sum(load[2] for load in views[0]) == len(under_way)
        for gateway in gateways.values():
            gateway.router.check_integrity()
            assert gateway.sharing.peers.keys() == gateways.keys() - {gateway.sharing.gateway}

    live(story)
