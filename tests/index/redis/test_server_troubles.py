"""Servers that die, stop, forget, refuse, fill up or are not what they seem: answers get empty, never wrong, and come back."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.index.redis.server import RedisServer
from tests.index.redis.support import PATIENCE, SLOW, namespace, rows, shared, until
from tests.index.redis.test_directory_leases import TEXT, A, blocks, say
from tests.index.support import removed, stored
from tests.ports import free_ports

from kvyard.clock import SECOND, VirtualClock
from kvyard.errors import KvyardError
from kvyard.events.transport import State
from kvyard.index import Source
from kvyard.index.redis import RedisIndex, SharedIndexer
from kvyard.index.redis.server import Server, Unavailable

pytestmark = pytest.mark.redis

QUICK: dict[str, Any] = {"namespace": "n", "timeout": SLOW, "backoff": 0.1, "lease": 30.0}


@contextlib.contextmanager
def pair(server: RedisServer, **options: Any) -> Iterator[tuple[SharedIndexer, SharedIndexer]]:
    """A writer that has announced all of a text, and a reader who knows."""
    options = {**QUICK, **options}
    with shared(server, **options) as reader, shared(server, **options) as writer:
        writer.register(Source(stream="a", worker="a"))
        say(writer, stored(TEXT, 4), seq=0)
        assert blocks(reader) == blocks(writer) == 8
        yield writer, reader


def whole(writer: SharedIndexer, reader: SharedIndexer, expected: int, most: int | None = None) -> bool:
    """Return true if both give the one right answer again. Meanwhile they must not give a longer one, or more than ``most``."""
    writer.tick()
    reader.tick()
    found = [blocks(writer), blocks(reader)]
    assert max(found) <= (expected if most is None else most), found
    return found == [expected, expected]


def test_a_server_that_is_killed_and_comes_back_empty(own_server: RedisServer) -> None:
    with pair(own_server) as (writer, reader):
        own_server.kill()
        say(writer, removed(TEXT, 4, 5, 8), seq=1)
        assert blocks(writer) == blocks(reader) == 0
        match = reader.score(TEXT).workers.get(A) or writer.score(TEXT).workers[A]
        assert match.state == State.STALE and "can't be used" in match.reason and own_server.url in match.reason
        say(writer, removed(TEXT, 4, 4, 5), seq=2)
        own_server.start()
        until(lambda: whole(writer, reader, 4))
        assert writer.backend.session.epochs + reader.backend.session.epochs == 2
        writer.check_integrity()


def test_a_server_that_comes_back_with_an_old_dump(own_server: RedisServer) -> None:
    """What it has saved was true once. It isn't believed, and is removed."""
    with pair(own_server) as (writer, reader):
        assert own_server.ask("SAVE").startswith("+OK")
        epoch = writer.backend.session.epoch
        say(writer, removed(TEXT, 4, 2, 8), seq=1)
        assert blocks(reader) == 2
        own_server.kill()
        own_server.start()
        assert int(own_server.ask("DBSIZE")[1:]) > 8
        assert blocks(reader) == 0
        until(lambda: whole(writer, reader, 2))
        assert writer.backend.session.epoch != epoch

        def purged() -> bool:
            writer.tick()
            reader.tick()
            return own_server.ask("KEYS", f"kvy:{epoch}*").startswith("*0")

        until(purged)
        writer.check_integrity()


def test_a_server_that_is_emptied(own_server: RedisServer) -> None:
    with pair(own_server) as (writer, reader):
        own_server.ask("FLUSHALL")
        assert blocks(reader) == 0
        until(lambda: whole(writer, reader, 8))
        assert reader.backend.server.errors.get("emptied") == 1


def test_a_server_that_forgot_its_scripts(own_server: RedisServer) -> None:
    with pair(own_server) as (writer, reader):
        own_server.ask("SCRIPT", "FLUSH")
        say(writer, removed(TEXT, 4, 7, 8), seq=1)
        until(lambda: whole(writer, reader, 7))
        assert writer.backend.server.errors == {"noscript": 1}


def test_a_server_that_stands_still(own_server: RedisServer) -> None:
    """It costs one time-out, then next to nothing; what it reads when it wakes up disturbs nobody."""
    with pair(own_server, timeout=2.0, backoff=1.0) as (writer, reader):
        own_server.pause()
        say(writer, removed(TEXT, 4, 4, 8), seq=1)
        start = time.monotonic()
        for _ in range(3):
            assert blocks(writer) == 0
        assert time.monotonic() - start < PATIENCE
        assert writer.backend.server.errors.get("timeout", 0) >= 1
        say(writer, removed(TEXT, 4, 3, 4), seq=2)
        own_server.resume()
        # The first removal may have reached it; of the second it hears when the writer tries again, or the lease ends.
        until(lambda: whole(writer, reader, 3, most=8))
        writer.check_integrity()


def test_a_server_that_is_full(own_server: RedisServer) -> None:
    with pair(own_server) as (writer, reader):
        own_server.ask("CONFIG", "SET", "maxmemory", "1")
        say(writer, removed(TEXT, 4, 4, 8), seq=1)
        assert blocks(reader) == blocks(writer) == 4, "what frees memory must work"
        say(writer, stored(TEXT[::-1], 4), removed(TEXT, 4, 3, 4), seq=2)
        assert writer.backend.server.errors.get("oom", 0) >= 1
        # Rows that can't be corrected are disowned at once, by the only means that is left.
        reader.backend.session.look(now=True)
        assert blocks(reader) == 0
        assert blocks(writer) == 0 and "memory" in writer.score(TEXT).workers[A].reason
        own_server.ask("CONFIG", "SET", "maxmemory", "0")
        until(lambda: whole(writer, reader, 3))
        writer.check_integrity()


def test_a_server_that_becomes_a_replica(own_server: RedisServer) -> None:
    with pair(own_server, lease=3.0) as (writer, reader):
        own_server.ask("REPLICAOF", "127.0.0.1", "1")
        say(writer, removed(TEXT, 4, 4, 8), seq=1)
        assert writer.backend.server.errors.get("readonly", 0) >= 1
        assert blocks(writer) == 0
        until(lambda: blocks(reader) == 0)
        with pytest.raises(KvyardError, match="read-only replica"):
            RedisIndex(own_server.url, namespace="other")
        own_server.ask("REPLICAOF", "NO", "ONE")
        until(lambda: whole(writer, reader, 4))


@pytest.mark.slow
def test_a_server_that_is_loading(own_server: RedisServer) -> None:
    with pair(own_server) as (writer, reader):
        for number in range(200):
            own_server.ask("SET", f"foreign-{number}", "x" * 2000)
        own_server.ask("SAVE")
        say(writer, removed(TEXT, 4, 6, 8), seq=1)
        own_server.kill()
        own_server.start("--key-load-delay", "30000", "--loading-process-events-interval-bytes", "1024")
        assert "LOADING" in own_server.ask("GET", "x")
        assert blocks(reader) == blocks(writer) == 0
        until(lambda: bool(writer.tick()) or "loading" in writer.backend.server.errors)
        own_server.ask("CONFIG", "SET", "key-load-delay", "0")
        until(lambda: whole(writer, reader, 6))


def test_somebody_else_s_keys_in_the_way(own_server: RedisServer) -> None:
    with pair(own_server) as (writer, reader):
        left = writer.backend.session.epoch
        version = f"kvy:{left}:version"
        own_server.ask("DEL", version)
        own_server.ask("RPUSH", version, "what is this")
        say(writer, removed(TEXT, 4, 4, 8), removed(TEXT, 4, 0, 2), seq=1)
        assert blocks(reader) == blocks(writer) == 0
        assert "wrongtype" in reader.backend.server.errors
        assert "WRONGTYPE" in writer.score(TEXT).workers[A].reason

        # Such an epoch is left, and all is written again: nothing has to be done by hand.
        def is_mended() -> bool:
            writer.tick()
            reader.tick()
            epochs = {one.backend.session.epoch for one in (writer, reader)}
            return writer.trouble == reader.trouble == "" and len(epochs) == 1 and epochs != {left}

        until(is_mended)
        until(lambda: bool(writer.tick()) or "0" in own_server.ask("EXISTS", version))
        say(writer, stored(TEXT, 4, 0, 3), seq=2)
        until(lambda: whole(writer, reader, 4))
        writer.check_integrity()


def test_a_key_of_another_program_at_the_index_s_own_name_is_named(own_server: RedisServer) -> None:
    own_server.ask("SET", "kvyard:taken", "what is this")
    with pytest.raises(KvyardError, match=r"its key kvyard:taken is a string of another program: remove it"):
        RedisIndex(own_server.url, namespace="taken")
    with pair(own_server) as (writer, reader):
        meta = f"kvyard:{writer.backend.session.namespace}"
        own_server.ask("DEL", meta)
        own_server.ask("RPUSH", meta, "x")
        say(writer, removed(TEXT, 4, 4, 8), seq=1)
        until(lambda: bool(writer.tick()) or f"its key {meta} is a list" in writer.trouble)
        assert blocks(writer) == 0
        own_server.ask("DEL", meta)
        until(lambda: whole(writer, reader, 4))
        assert writer.trouble == ""


def test_rows_by_themselves_survive_a_server(own_server: RedisServer) -> None:
    with rows(own_server, backoff=0.1) as index:
        index.store(0, [1, 2, 3])
        index.store(5, [1])
        assert index.lookup([1, 2, 3]) == [(1, 33), (3, 1)]
        own_server.kill()
        assert index.lookup([1, 2, 3]) == [] and index.reason and index.blind_lookups == 1
        assert list(index.store(0, [3, 4])) == [3]
        assert index.clear(5) == 1
        assert index.holds(0, 4) and not index.holds(5, 1)
        own_server.start()
        until(index.flush)
        assert index.lookup([1, 2, 3, 4]) == [(4, 1)]
        assert index.session.epochs == 2
        index.check_integrity()


def test_leases_given_up_while_disconnected_are_released_on_reconnection(shared_server: RedisServer) -> None:
    with pair(shared_server, namespace=namespace()) as (writer, reader):
        (owner,) = writer.backend.session.tokens
        writer.backend.server.close()
        writer.backend.disown(owner)
        assert blocks(reader) == 0


class TestAddresses:
    def test_nobody_there(self) -> None:
        with pytest.raises(KvyardError, match=r"redis://127\.0\.0\.1:1/0 can't be used: .*refused"):
            RedisIndex("redis://127.0.0.1:1/0")

    def test_an_attempt_to_connect_is_no_round_trip(self) -> None:
        server = Server("redis://127.0.0.1:1/0", timeout=SLOW, backoff=SECOND, clock=VirtualClock())
        with pytest.raises(Unavailable, match="refused"):
            server.connect()
        assert (server.connects, server.round_trips, server.errors) == (0, 0, {"connection": 1})

    def test_no_address(self) -> None:
        with pytest.raises(KvyardError, match="is no address of a Redis server"):
            RedisIndex("http://127.0.0.1:1/0")

    def test_times_that_are_none(self) -> None:
        with pytest.raises(KvyardError, match="more than 0 seconds"):
            RedisIndex(timeout=0)

    def test_passwords_work_and_are_not_shown(self, own_server: RedisServer) -> None:
        own_server.ask("CONFIG", "SET", "requirepass", "sesame")
        with pytest.raises(KvyardError, match="can't be used: Authentication required"):
            RedisIndex(own_server.url)
        with pytest.raises(KvyardError) as refused:
            RedisIndex(own_server.url.replace("//", "//:wrong-word@"))
        assert "wrong-word" not in str(refused.value)
        for scheme in ("redis", "valkey"):
            url = own_server.url.replace("redis://", f"{scheme}://:sesame@")
            with rows(own_server, url=url) as index:
                index.store(0, [1])
                assert index.lookup([1]) == [(1, 1)]
                assert "sesame" not in index.server.address

    def test_a_policy_that_forgets_at_random_is_refused(self, own_server: RedisServer) -> None:
        own_server.ask("CONFIG", "SET", "maxmemory", "100mb")
        own_server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        with pytest.raises(KvyardError, match="maxmemory-policy is allkeys-lru: set noeviction"):
            RedisIndex(own_server.url)
        own_server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
        with rows(own_server) as index:
            assert not index.reason

    def test_a_cluster_is_refused(self, own_server: RedisServer) -> None:
        own_server.kill()
        own_server.start("--cluster-enabled", "yes", "--cluster-port", str(free_ports(1)))
        with pytest.raises(KvyardError, match="a node of a cluster"):
            RedisIndex(own_server.url)


def test_a_command_that_is_refused_is_not_kept(shared_server: RedisServer) -> None:
    """Nothing but the caller refers to the exception, which refers to all commands and replies."""
    asked = Server(shared_server.url, timeout=SLOW, backoff=0, clock=VirtualClock())
    asked.connect()
    value = bytes(1000)
    before = sys.getrefcount(value)
    gc.disable()
    try:
        with pytest.raises(KvyardError):
            asked.commands([("SET", "n:text", value), ("LPUSH", "n:text", value)])
        assert sys.getrefcount(value) == before
    finally:
        gc.enable()
        asked.close()
