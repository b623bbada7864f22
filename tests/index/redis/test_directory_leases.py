"""One writer per worker: leases, tokens that fence, take-overs, and what readers make of it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.index.redis.server import RedisServer
from tests.index.redis.support import expire, namespace, rows, shared, until
from tests.index.support import removed, stored

from kvyard.clock import SECOND, VirtualClock
from kvyard.errors import KvyardError
from kvyard.events.transport import Origin, State, Update
from kvyard.events.types import Event, Tier
from kvyard.index import Holder, Identity, Source
from kvyard.index.redis import RedisIndex, SharedIndexer, scripts
from kvyard.index.redis.shared import KEEP

pytestmark = pytest.mark.redis

TEXT = list(range(100, 132))
A = Holder("a")


def say(indexer: SharedIndexer, *events: Event, seq: int, stream: str = "a", **fields: Any) -> None:
    fields = {"epoch": 0, "origin": Origin.LIVE, "state": State.FRESH, "dialect": "map", **fields}
    indexer.apply(Update(stream=stream, topic="", seq=seq, events=list(events), **fields))


def blocks(indexer: SharedIndexer, worker: Holder = A) -> int:
    """Return the blocks that a worker could use of the text, by the short way and the long way."""
    keys = indexer.identity.keys(TEXT)
    for _ in range(100):
        before = indexer.backend.server.connected, indexer.backend.server.connects, indexer.backend.directory.looks
        short = indexer.matches(keys).get(worker, 0)
        match = indexer.score_keys(keys).workers.get(worker)
        server = indexer.backend.server
        if before == (server.connected, server.connects, indexer.backend.directory.looks):
            assert match is None or match.blocks == short
            return short
    raise AssertionError("it never comes to rest")


class TestRows:
    def test_a_writer_that_slept_is_fenced_off(self, shared_server: RedisServer) -> None:
        name = namespace()
        with rows(shared_server, namespace=name) as old:
            old.store(0, [1, 2, 3])
            assert old.flush()
            expire(shared_server, old, "index")
            with rows(shared_server, namespace=name) as new:
                new.store(0, [1, 2])
                assert new.flush()
                old.store(0, [4])
                old.store(1, [5])
                old.remove(0, [1])
                assert not old.flush()
                assert old.session.fenced == 1
                assert new.lookup([1, 2, 3]) == [(2, 1)]
                assert new.lookup([5]) == []
                # Numbers of another process mean nothing to it, so it finds nothing, and says why.
                assert old.lookup([1, 2]) == []
                assert new.session.replica in old.reason
                new.check_integrity()

    def test_only_the_last_token_writes(self, shared_server: RedisServer) -> None:
        """What a dead connection left behind may be read by the server at any later time."""
        with rows(shared_server) as index:
            index.store(0, [1])
            index.flush()
            token = index.session.tokens["index"]
            index.server.close()
            index.remove(0, [1])
            assert index.flush()
            late = index.session.calls(scripts.WRITE, [("index", token, b"s", b"0", (1).to_bytes(8, "little"))])
            assert late == [[b"fenced"]]
            assert index.lookup([1]) == []
            index.check_integrity()

    def test_a_lease_that_nobody_took_goes_on(self, shared_server: RedisServer) -> None:
        with rows(shared_server) as index:
            index.store(0, [1])
            index.flush()
            expire(shared_server, index, "index")
            index.store(0, [2])
            assert index.flush() and index.announced == 1
            assert index.lookup([1, 2]) == [(2, 1)]

    def test_a_second_process_waits_its_turn(self, shared_server: RedisServer) -> None:
        name = namespace()
        with rows(shared_server, namespace=name) as first, rows(shared_server, namespace=name, lease=3.0) as second:
            second.store(3, [7])
            assert not second.flush() and second.lookup([7]) == [] and second.unsent_keys == 1
            first.close()
            until(second.flush)
            assert second.lookup([7]) == [(1, 8)]

    def test_namespaces_are_apart(self, shared_server: RedisServer) -> None:
        with rows(shared_server) as one, rows(shared_server) as other:
            one.store(0, [1])
            other.store(1, [1])
            assert (one.lookup([1]), other.lookup([1])) == ([(1, 1)], [(1, 2)])


class TestReplicas:
    def test_one_writes_and_all_answer(self, shared_server: RedisServer) -> None:
        name = namespace()
        with (
            shared(shared_server, namespace=name) as one,
            shared(shared_server, namespace=name) as two,
            shared(shared_server, namespace=name) as reader,
        ):
            for indexer in (one, two):
                indexer.register(Source(stream="a", worker="a"))
            two.register(Source(stream="b", worker="b"))
            assert (one.writes("a"), two.writes("a"), two.writes("b")) == (True, False, True)
            for indexer in (one, two):
                say(indexer, stored(TEXT, 4, 0, 3), seq=0)
            say(two, stored(TEXT, 4, 0, 5), seq=0, stream="b")
            for indexer in (one, two, reader):
                assert blocks(indexer) == 3
                assert blocks(indexer, Holder("b")) == 5
                indexer.refresh()
                assert set(indexer.scorer.standings) == {A, Holder("b")}
                roster = indexer.roster([Holder("b"), A])
                assert indexer.reaches(roster, indexer.identity.keys(TEXT)) == [[(5, 0b01), (3, 0b10)]]
                held = {
                    key
                    for number in indexer.places.of.get(A, ())
                    for run in indexer.backend.held(number)
                    for key in run
                }
                assert held == set(indexer.identity.keys(TEXT)[:3])
            say(one, removed(TEXT, 4, 1, 3), seq=1)
            # The other replica hasn't heard of it, but whoever writes has.
            assert [blocks(indexer) for indexer in (one, two, reader)] == [1, 1, 1]

    def test_the_standby_takes_over_with_what_it_knows(self, shared_server: RedisServer) -> None:
        name = namespace()
        with shared(shared_server, namespace=name) as reader, shared(shared_server, namespace=name) as one:
            with shared(shared_server, namespace=name) as two:
                for indexer in (one, two):
                    indexer.register(Source(stream="a", worker="a"))
                    say(indexer, stored(TEXT, 4), stored(TEXT, 4, 0, 2, tier=Tier.G2), seq=0)
                say(two, removed(TEXT, 4, 4, 8), seq=1)
                assert blocks(reader) == 8
                expire(shared_server, one.backend, "worker a")
                two.backend.session.ready()
                two.backend.session.maintain()
                assert two.writes("a")
                two.tick()
                assert blocks(reader) == 4
                # The one before is fenced off: what it says now reaches nobody.
                say(one, removed(TEXT, 4), seq=1)
                assert not one.writes("a")
                assert [blocks(indexer) for indexer in (one, two, reader)] == [4, 4, 4]
                for indexer in (one, two, reader):
                    indexer.check_integrity()

    def test_a_standby_that_knows_nothing_earns_nothing(self, shared_server: RedisServer) -> None:
        name = namespace()
        with (
            shared(shared_server, namespace=name) as reader,
            shared(shared_server, namespace=name) as one,
            shared(shared_server, namespace=name) as two,
        ):
            for indexer in (one, two):
                indexer.register(Source(stream="a", worker="a"))
            say(one, stored(TEXT, 4), seq=0)
            assert blocks(reader) == 8
            expire(shared_server, one.backend, "worker a")
            two.backend.session.maintain()
            two.tick()
            assert blocks(reader) == 0
            assert reader.score(TEXT).workers[A].reason == "nothing received yet"
            say(two, stored(TEXT, 4, 0, 2), seq=9, state=State.STALE)
            assert blocks(reader) == 0
            say(two, stored(TEXT, 4, 0, 2), seq=9, origin=Origin.SNAPSHOT, replaces=True)
            assert blocks(reader) == 2

    def test_without_a_writer_rows_earn_nothing(self, shared_server: RedisServer) -> None:
        name = namespace()
        with shared(shared_server, namespace=name, lease=0.2) as reader:
            with shared(shared_server, namespace=name) as one:
                one.register(Source(stream="a", worker="a"))
                say(one, stored(TEXT, 4), seq=0)
                assert blocks(reader) == 8
            until(lambda: blocks(reader) == 0)
            match = reader.score(TEXT).workers[A]
            assert match.state == State.STALE and match.reason == "the replica that wrote worker a is gone"
            assert "gone" in reader.explain(TEXT, A).summary

    def test_a_stale_stream_is_stale_for_all(self, shared_server: RedisServer) -> None:
        name = namespace()
        with shared(shared_server, namespace=name) as reader, shared(shared_server, namespace=name) as one:
            one.register(Source(stream="a", worker="a"))
            say(one, stored(TEXT, 4), seq=0)
            assert blocks(reader) == 8
            say(one, stored(TEXT, 4), seq=5, state=State.STALE, reason="batches before 5 are missing")
            assert blocks(reader) == 0
            assert "missing" in reader.score(TEXT).workers[A].reason
            say(one, seq=5, origin=Origin.SNAPSHOT, replaces=True)
            say(one, stored(TEXT, 4, 0, 1), seq=6)
            assert blocks(reader) == 1
            one.lose("a", "somebody says so")
            assert blocks(reader) == 0 and reader.score(TEXT).workers[A].reason == "somebody says so"

    def test_a_writer_that_slept_does_not_vouch_at_once(self, shared_server: RedisServer) -> None:
        """What it missed may still wait to be read."""
        name, clock = namespace(), VirtualClock(1)
        with shared(shared_server, namespace=name) as reader, shared(shared_server, namespace=name, clock=clock) as one:
            one.register(Source(stream="a", worker="a"))
            say(one, stored(TEXT, 4), seq=0)
            assert blocks(reader) == 8
            expire(shared_server, one.backend, "worker a")
            clock.advance(100 * SECOND)
            one.tick()
            reader.backend.session.look(now=True)
            assert blocks(reader) == 0
            say(one, removed(TEXT, 4, 3, 8), seq=1)
            clock.advance(121 * SECOND)
            one.tick()
            reader.backend.session.look(now=True)
            assert blocks(reader) == 3

    def test_slots_are_given_to_others(self, shared_server: RedisServer) -> None:
        """Workers come and go for ever; no reader takes one for another, and masks stay small."""
        name = namespace()
        with shared(shared_server, namespace=name) as reader, shared(shared_server, namespace=name) as one:
            for turn in range(30):
                worker = f"w{turn}"
                one.register(Source(stream=worker, worker=worker))
                say(one, stored(TEXT, 4, 0, 1 + turn % 8), seq=0, stream=worker)
                assert reader.matches(reader.identity.keys(TEXT)) == {Holder(worker): 1 + turn % 8}
                one.unregister(worker)
                one.tick()
                assert reader.matches(reader.identity.keys(TEXT)) == {}
            assert one.backend.usage().blocks == 0
            assert int(one.backend.session.command("GET", "next")) <= 3
            assert len(one.places) <= 3 and len(reader.places) <= 3

    def test_rows_without_a_writer_are_removed_in_the_end(self, shared_server: RedisServer) -> None:
        name = namespace()
        clock = VirtualClock(1)
        with shared(shared_server, namespace=name, clock=clock) as reader:
            with shared(shared_server, namespace=name) as one:
                one.register(Source(stream="a", worker="a"))
                say(one, stored(TEXT, 4), seq=0)
            for _ in range(3):
                clock.advance(clock.now() + KEEP // 2 + SECOND)
                reader.tick()
            reader.tick()
            assert reader.backend.usage().blocks == 0
            assert reader.backend.session.command("HGETALL", "fence") == []

    def test_changes_may_linger_for_more(self, shared_server: RedisServer) -> None:
        name, clock = namespace(), VirtualClock(1)
        with (
            shared(shared_server, namespace=name) as reader,
            shared(shared_server, namespace=name, clock=clock, linger=1.0) as one,
        ):
            one.register(Source(stream="a", worker="a"))
            one.tick()
            trips = one.backend.server.round_trips
            for seq in range(8):
                say(one, stored(TEXT, 4, seq, seq + 1), seq=seq)
            assert one.backend.server.round_trips == trips and blocks(reader) == 0
            assert blocks(one) == blocks(reader) == 8, "its own questions don't wait"
            say(one, removed(TEXT, 4, 7, 8), seq=8)
            assert blocks(reader) == 8 and one.due == SECOND + 1
            clock.advance(one.due)
            one.tick()
            assert blocks(reader) == 7

    def test_ages_are_known_to_readers(self, shared_server: RedisServer) -> None:
        name = namespace()
        with shared(shared_server, namespace=name) as reader, shared(shared_server, namespace=name) as one:
            one.register(Source(stream="a", worker="a"))
            say(one, stored(TEXT, 4), seq=0)
            reader.backend.session.look(now=True)
            reader.tick(10 * SECOND)
            assert reader.score(TEXT, now=12 * SECOND).workers[A].age == 2 * SECOND
            say(one, stored(TEXT, 4), seq=1)
            one.tick()
            reader.backend.session.look(now=True)
            reader.tick(20 * SECOND)
            assert reader.score(TEXT, now=21 * SECOND).workers[A].age == SECOND

    def test_another_identity_is_refused(self, shared_server: RedisServer) -> None:
        name = namespace()
        with shared(shared_server, namespace=name):
            with pytest.raises(KvyardError, match=r"another index \(shared blocks of 4 tokens"):
                SharedIndexer(shared_server.url, Identity(8), namespace=name)
            with pytest.raises(KvyardError, match="another index"):
                RedisIndex(shared_server.url, namespace=name)
