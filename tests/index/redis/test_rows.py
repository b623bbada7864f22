"""The backend on a real server: the contract, the naive model, what things cost, and llm-d's defects where they apply."""

from __future__ import annotations

import random
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.index import test_backend
from tests.index.naive import NaiveIndex
from tests.index.redis.server import RedisServer
from tests.index.redis.support import namespace, rows

from kvyard.errors import KvyardError
from kvyard.index.redis import RedisIndex

pytestmark = pytest.mark.redis

CONTRACT = [name for name in dir(test_backend.TestContract) if name.startswith("test_")]


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=8)
def test_redis_is_the_naive_model(shared_server: RedisServer, seed: int) -> None:
    with rows(shared_server) as index:
        test_backend.walk(index, NaiveIndex(), seed, 50, check=3)


@pytest.mark.slow
def test_redis_is_the_naive_model_for_long(shared_server: RedisServer) -> None:
    for seed in range(10):
        with rows(shared_server) as index:
            test_backend.walk(index, NaiveIndex(), seed, 1500, check=7)


@pytest.mark.parametrize("name", CONTRACT)
def test_d6_the_contract_is_that_of_every_backend(shared_server: RedisServer, name: str) -> None:
    made: list[RedisIndex] = []

    def make() -> RedisIndex:
        made.append(RedisIndex(shared_server.url, namespace=namespace(), timeout=20))
        return made[-1]

    try:
        getattr(test_backend.TestContract(), name)(make)
    finally:
        for index in made:
            index.close()


def test_nobody_imports_redis_unless_asked() -> None:
    code = "import sys, kvyard.index, kvyard.index.redis; sys.exit('redis' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_redis_py_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(KvyardError, match=r"pip install 'kvyard\[redis\]'"):
        RedisIndex()


class TestCost:
    def test_a_deep_prompt_takes_one_round_trip(self, shared_server: RedisServer) -> None:
        keys = [random.Random(1).getrandbits(64) for _ in range(4096)]
        with rows(shared_server) as index:
            for place in range(8):
                index.store(place, keys)
            assert index.lookup(keys) == [(4096, 255)]
            before = index.server.round_trips
            assert index.lookup(keys) == [(4096, 255)]
            assert index.server.round_trips == before + 1
            longer = [*keys, *range(4096)]
            assert index.lookup(longer) == [(4096, 255)]
            assert index.server.round_trips == before + 3

    def test_news_come_with_the_rows(self, shared_server: RedisServer) -> None:
        """What a place means may have changed: that takes no second question."""
        with rows(shared_server) as index:
            index.lookup([1])
            for place in range(20):
                index.store(place, [1, 2])
                before = index.server.round_trips
                assert index.lookup([1, 2]) == [(2, (2 << place) - 1)]
                assert index.server.round_trips == before + 2  # the store, the lookup

    def test_changes_travel_together(self, shared_server: RedisServer) -> None:
        with rows(shared_server) as index:
            before = index.server.round_trips
            for key in range(1000):
                index.store(key % 5, [key])
            assert index.flush()
            assert index.server.round_trips <= before + 3
            index.check_integrity()

    def test_a_clear_costs_by_its_own_blocks(self, own_server: RedisServer) -> None:
        """Counted by the server: chunks of rows that were read, whoever asked for them."""

        def chunks() -> int:
            found = re.search(r"cmdstat_mget:calls=(\d+)", own_server.ask("INFO", "commandstats"))
            return int(found[1]) if found else 0

        with rows(own_server) as index:
            for start in range(0, 40_000, 1000):
                index.store(0, range(start, start + 1000))
            index.store(1, range(10))
            index.flush()
            before, trips = chunks(), index.server.round_trips
            assert index.clear(1) == 10
            index.flush()
            assert index.server.round_trips == trips + 1
            assert index.usage().blocks == 40_000
            assert chunks() <= before + 2
            index.check_integrity()

    def test_removed_rows_take_no_room(self, own_server: RedisServer) -> None:
        with rows(own_server) as index:
            for place in range(4):
                index.store(place, range(5000))
            index.remove(0, range(5000))
            for place in range(1, 4):
                index.clear(place)
            assert index.usage().blocks == 0
            index.check_integrity()
            assert int(own_server.ask("DBSIZE")[1:]) < 12

    def test_a_budget_bounds_the_server_too(self, own_server: RedisServer) -> None:
        with rows(own_server, budget=1 << 20) as index:
            hot = list(range(64))
            index.store(0, hot)
            for text in range(1, 300):
                index.store(text % 3, range(text * 1000, text * 1000 + 64))
                index.lookup(hot)
            usage = index.usage()
            assert usage.evicted > 0 and usage.bytes <= 1 << 20
            assert usage.blocks == index.mirror.usage().blocks < 64 * 300 - usage.evicted // 2
            assert index.lookup(hot) == [(64, 1)]
            index.check_integrity()

    def test_a_store_larger_than_the_budget(self, own_server: RedisServer) -> None:
        """It forgets part of itself; nothing stays on the server that nobody would take back."""
        with rows(own_server, budget=700_000) as index:
            index.store(0, range(20_000))
            assert 0 < index.usage().blocks < 6000
            index.check_integrity()
            index.remove(0, range(20_000))
            assert index.usage().blocks == 0 and index.lookup(range(20_000), through_holes=True) == []
            index.check_integrity()


class Mute(int):
    """A key that must not be written down."""

    def __repr__(self) -> str:
        raise AssertionError("somebody formats keys on the hot path")

    __str__ = __format__ = __repr__  # type: ignore[assignment]


class TestDefects:
    def test_d11_nothing_is_formatted_on_the_way(self, shared_server: RedisServer) -> None:
        keys = [Mute(key) for key in range(2000)]
        with rows(shared_server) as index:
            index.store(0, keys)
            index.store(0, keys)
            index.remove(0, keys[1500:])
            assert index.lookup(keys) == [(1500, 1)]

    def test_d15_nothing_waits_for_a_server_that_is_away(self, own_server: RedisServer) -> None:
        with rows(own_server, timeout=1.0, backoff=0.1) as index:
            index.store(0, range(100))
            index.flush()
            own_server.kill()
            for start in range(0, 50_000, 100):
                index.store(0, range(start, start + 100))
            assert index.pending.keys < 2048
            assert index.unsent_keys > 40_000
            own_server.start()
            while not index.flush():
                pass
            assert index.lookup(range(50_000)) == [(50_000, 1)]
            index.check_integrity()

    def test_d16_rows_do_not_expire(self, own_server: RedisServer) -> None:
        """Only leases have an end. A row that ran out by itself would take the claims of others with it."""
        with rows(own_server) as index:
            index.store(0, range(20))
            index.flush()
            keys = [key for _, found in [index.server.commands([("SCAN", 0, "COUNT", 1000)])[0]] for key in found]
            ends = {key for key in keys if index.server.commands([("PTTL", key)])[0] >= 0}
            assert len(keys) > 20 and ends == {f"kvy:{index.session.epoch}:lease:index".encode()}

    def test_d17_all_of_three_hundred_holders_are_known(self, shared_server: RedisServer) -> None:
        with rows(shared_server) as index:
            for place in range(300):
                index.store(place, [1, 2, 3])
            assert index.lookup([1, 2, 3]) == [(3, (1 << 300) - 1)]
            index.check_integrity()


def test_existing_rows_are_not_written_again(shared_server: RedisServer) -> None:
    with rows(shared_server) as index:
        index.store(0, [1, 2])
        assert index.flush() and not index.pending
        assert list(index.store(0, [1, 1])) == [1, 1] and not index.pending
        assert list(index.store(0, [2, 3])) == [2] and index.pending.keys == 1
