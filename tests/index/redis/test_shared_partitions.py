"""Leases under partitions: three writers of one worker and a reader, a server that stands still, dies and loses all, commands
that arrive long after their caller gave up, clocks that jump. What they all saw must have an order that explains it
(``lease_history``).

``KVYARD_LEASE_SEED`` and ``KVYARD_LEASE_SECONDS`` are another seed and another time for the long run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import threading
import time
from collections import Counter
from typing import Any

import msgspec
import pytest
from tests.index.redis.lease_history import LeaseRecorder, LeaseState, early_takeovers, order_of
from tests.index.redis.linearizability import UNKNOWN, Operation
from tests.index.redis.relay import Relay
from tests.index.redis.server import RedisServer
from tests.index.redis.support import namespace
from tests.index.support import removed, stored

from kvyard.clock import SECOND, Clock, WallClock
from kvyard.errors import KvyardError
from kvyard.events.transport import Origin, State, Update
from kvyard.index import Holder, Identity, Source
from kvyard.index.redis import SharedIndexer, scripts
from kvyard.index.redis.scripts import Script

SEED = int(os.environ.get("KVYARD_LEASE_SEED", "17"))
SECONDS = float(os.environ.get("KVYARD_LEASE_SECONDS", "60"))
LEASE = 0.9
TIMEOUT = 0.3
WRITERS = 3
TEXT = list(range(4 * 240))
A = Holder("a")
OWNER = "worker a"


def operation(kind: str, *arguments: Any, at: float, result: Any = "ok", lasts: float = 1.0) -> Operation:
    return Operation(kind=kind, caller="x", arguments=arguments, result=result, called=at, returned=at + lasts)


class TestChecker:
    """What must be seen is, and what is right passes."""

    BEGUN = (operation("begin", "run", "e", "i", at=0, result=("e", "i")),)

    def acquired(self, who: str, token: int, at: float, **more: Any) -> Operation:
        return operation("acquire", "e", OWNER, who, 900, at=at, result=("ok", token), **more)

    def wrote(self, token: int, key: bytes, at: float, result: str = "ok", **more: Any) -> Operation:
        return operation("write", "e", token, ((b"s", key * 8),), False, at=at, result=result, **more)

    def read(self, blocks: int, at: float) -> Operation:
        return operation("read", (b"1" * 8, b"2" * 8), at=at, result=blocks)

    def test_one_after_the_other(self) -> None:
        good = [*self.BEGUN, self.acquired("one", 1, 2), self.wrote(1, b"1", 4), self.read(1, 6), self.read(0, 8)]
        assert order_of(good, LeaseState()) == [*good]
        assert order_of([*good, self.read(2, 10)], LeaseState()) is None
        after = [*good, self.acquired("two", 2, 10)]
        assert order_of([*after, self.wrote(1, b"2", 12, "fenced")], LeaseState()) is not None
        assert order_of([*after, self.wrote(1, b"2", 12)], LeaseState()) is None, "a writer that was fenced off"
        assert order_of([*after, self.read(1, 12)], LeaseState()) is None, "rows that were void"
        assert order_of([*after, self.acquired("three", 2, 12)], LeaseState()) is None, "a token given twice"

    def test_at_the_same_time(self) -> None:
        both = [self.wrote(1, b"1", 4, lasts=4), self.read(1, 5), self.read(0, 5)]
        assert order_of([*self.BEGUN, self.acquired("one", 1, 2), *both], LeaseState()) is not None
        # It was there, then it wasn't, and nothing took it away: "nothing" is always right, but this isn't nothing.
        twice = [self.wrote(1, b"2", 4, lasts=4), self.wrote(1, b"1", 4, lasts=4), self.read(2, 5)]
        assert order_of([*self.BEGUN, self.acquired("one", 1, 2), *twice], LeaseState()) is not None
        assert order_of([*self.BEGUN, self.acquired("one", 1, 2), *twice, self.read(1, 10)], LeaseState()) is None

    def test_an_operation_of_unknown_outcome_may_have_happened(self) -> None:
        begun = [*self.BEGUN, self.acquired("one", 1, 2)]
        late = Operation(kind="write", caller="x", arguments=("e", 1, ((b"s", b"1" * 8),), False), called=3)
        assert order_of([*begun, late, self.read(0, 5), self.read(1, 90)], LeaseState()) is not None
        assert order_of([*begun, late, self.read(0, 5)], LeaseState()) is not None
        assert order_of([*begun, late, self.acquired("two", 2, 5), self.read(1, 90)], LeaseState()) is None

    def test_takeovers_before_their_time(self) -> None:
        first, second = self.acquired("one", 1, 2), self.acquired("two", 2, 4)
        second = Operation(**{**{name: getattr(second, name) for name in second.__struct_fields__}, "caller": "y"})
        assert early_takeovers([*self.BEGUN, first, second], 10.0, []) == [(4, "y")]
        assert early_takeovers([*self.BEGUN, first, second], 2.0, []) == []
        assert early_takeovers([*self.BEGUN, first, second], 10.0, [3.5]) == []


class JumpingClock(Clock):
    """A replica's clock, which someone sets."""

    def __init__(self) -> None:
        self._inner = WallClock()
        self.offset = 0

    def now(self) -> int:
        return self._inner.now() + self.offset


class Replica:
    """A writer that says something new all the time, or a reader, in a thread of its own."""

    def __init__(self, number: int, url: str, name: str, recorder: LeaseRecorder, *, writes: bool) -> None:
        self.clock = JumpingClock()
        self.number, self.recorder, self.writes = number, recorder, writes
        self.sleeps = 0.0
        self.error: BaseException | None = None
        self.answers = self.hits = 0
        self.indexer = SharedIndexer(
            url,
            Identity(4),
            namespace=name,
            replica=f"r{number}",
            lease=LEASE,
            timeout=TIMEOUT,
            backoff=0.1,
            clock=self.clock,
        )
        recorder.watch(f"r{number}", self.indexer.backend)
        self._rng = random.Random(number)
        self._held = 0
        self._seq = -1
        self._thread = threading.Thread(target=self._run)
        self._ending = threading.Event()

    def begin(self) -> None:
        if self.writes:
            self.indexer.register(Source(stream="a", worker="a"))
        self._thread.start()

    def end(self) -> None:
        self._ending.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        self.indexer.close()

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                if self.sleeps:
                    nap, self.sleeps = self.sleeps, 0.0
                    time.sleep(nap)
                self._write() if self.writes else self._read()
                self.indexer.tick(self.clock.now())
                time.sleep(self._rng.uniform(0.005, 0.04))
        except BaseException as error:
            self.error = error

    def _write(self) -> None:
        """From one length to another that only this writer uses."""
        length = WRITERS * self._rng.randrange(len(TEXT) // 4 // WRITERS) + self.number
        events = []
        if length < self._held:
            events = [removed(TEXT, 4, length, self._held)]
        elif length > self._held:
            events = [stored(TEXT, 4, self._held, length)]
        self._held, self._seq = length, self._seq + 1
        common = {"epoch": 0, "origin": Origin.LIVE, "state": State.FRESH, "dialect": "map", "topic": ""}
        self.indexer.apply(Update(stream="a", seq=self._seq, events=events, **common), self.clock.now())

    def _read(self) -> None:
        keys = self.indexer.identity.keys(TEXT)
        called = time.monotonic()
        found = self.indexer.matches(keys).get(A, 0)
        prompt = tuple(key.to_bytes(8, "little") for key in keys)
        self.recorder.add(
            kind="read", caller="reader", arguments=(prompt,), result=found, called=called, returned=time.monotonic()
        )
        self.answers += 1
        self.hits += found > 0


class Partitioned:
    """Replicas behind relays, one server, and what goes wrong."""

    def __init__(self, server: RedisServer, seed: int) -> None:
        self.server, self.rng = server, random.Random(seed)
        self.recorder = LeaseRecorder(OWNER)
        self.cut_short: list[float] = []
        self.faults: dict[str, int] = {}
        self._name = namespace()
        self.begun = LeaseState()
        """The server when the first replica was connected."""
        self.relays = [Relay(server.port) for _ in range(WRITERS + 1)]
        self.replicas = [
            Replica(number, relay.url, self._name, self.recorder, writes=number < WRITERS)
            for number, relay in enumerate(self.relays)
        ]

    def run(self, seconds: float) -> list[Operation]:
        began = time.monotonic()
        self.begun = LeaseState(epoch=self.replicas[0].indexer.backend.session.epoch)
        for replica in self.replicas:
            replica.begin()
        ways = [
            self.stop,
            self.pause,
            self.kill,
            self.expire,
            self.lengthen,
            self.sleep,
            self.jump,
            self.hold,
            self.hold,
        ]
        try:
            while time.monotonic() - began < seconds:
                time.sleep(self.rng.uniform(0.1, 0.9))
                way = self.rng.choice(ways)
                self.faults[way.__name__] = self.faults.get(way.__name__, 0) + 1
                way()
        finally:
            for relay in self.relays:
                relay.release()
            for replica in self.replicas:
                replica.end()
            for relay in self.relays:
                relay.close()
        for replica in self.replicas:
            if replica.error is not None:
                raise replica.error
        return sorted(self.recorder.history, key=lambda one: one.called)

    def stop(self) -> None:
        """The server stands still."""
        self.server.pause()
        time.sleep(self.rng.uniform(0.05, 1.5 * LEASE))
        self.server.resume()

    def pause(self) -> None:
        """The server takes commands, and doesn't run them."""
        self.server.ask("CLIENT", "PAUSE", str(self.rng.randint(50, 900)), "ALL")

    def kill(self) -> None:
        """The server dies and comes back empty."""
        called = time.monotonic()
        self.server.kill()
        self.server.start()
        self.recorder.add(kind="restart", caller="-", result="ok", called=called, returned=time.monotonic())
        self.cut_short.append(time.monotonic())

    def expire(self) -> None:
        """The lease runs out, as where the server's clock jumps ahead."""
        self.cut_short.append(time.monotonic())
        self._lease("PEXPIRE", "1")
        self.cut_short.append(time.monotonic())

    def lengthen(self) -> None:
        """It lasts longer than it should, as where the server's clock is put back."""
        self._lease("PEXPIRE", str(round(3000 * LEASE)))

    def sleep(self) -> None:
        """A replica doesn't run for a while, and doesn't notice."""
        self.rng.choice(self.replicas).sleeps = self.rng.uniform(0.5, 2.0) * LEASE

    def jump(self) -> None:
        """A replica's clock is set."""
        self.rng.choice(self.replicas).clock.offset += round(self.rng.uniform(-2.0, 4.0) * SECOND)

    def hold(self) -> None:
        """A replica's commands are on their way for long, or its connection is cut and they arrive after that."""
        relay = self.rng.choice(self.relays)
        relay.hold()
        time.sleep(self.rng.uniform(0.05, 2.5 * LEASE))
        relay.release()

    def _lease(self, *command: str) -> None:
        with contextlib.suppress(OSError):
            epoch = self.server.ask("HGET", f"kvyard:{self._name}", "epoch").split("\r\n")[1]
            self.server.ask(command[0], f"kvy:{epoch}:lease:{OWNER}", *command[1:])


@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 2 + 400)
def test_the_history_is_linearizable(own_server: RedisServer) -> None:
    world = Partitioned(own_server, SEED)
    history = world.run(SECONDS)
    kinds = Counter(f"{one.kind} {one.result}" if isinstance(one.result, str) else one.kind for one in history)
    reader = world.replicas[-1]
    writers = {one.arguments[2] for one in history if one.kind == "acquire" and one.result[0] == "ok"}
    print(
        f"\n{len(history)} operations: {dict(kinds)}; faults {world.faults}; "
        f"the reader found rows {reader.hits} times of {reader.answers}"
    )
    assert order_of(history, world.begun) is not None, first_unexplained(history, world.begun)
    assert early_takeovers(history, LEASE, world.cut_short) == []
    assert len(writers) == WRITERS and reader.hits > 10, "too little happened to show anything"
    assert kinds["write fenced"] + kinds["renew lost"], "no writer was ever fenced off"


def first_unexplained(history: list[Operation], begun: LeaseState) -> str:
    """The operation up to whose return all can't be explained, though it can up to the one before; and what was around it."""
    ends = sorted(one.returned for one in history if one.result != UNKNOWN)
    low, high = 0, len(ends) - 1

    def upto(end: float) -> list[Operation]:
        part = [one for one in history if one.called <= end]
        return [
            one if one.returned <= end else msgspec.structs.replace(one, result=UNKNOWN, returned=float("inf"))
            for one in part
            if one.returned <= end or one.kind != "read"
        ]

    while low < high:
        middle = (low + high) // 2
        if order_of(upto(ends[middle]), begun) is None:
            high = middle
        else:
            low = middle + 1
    at = ends[low]
    around = [one for one in history if one.called <= at and one.returned >= at - 2]
    lines = [
        f"{one.called - at:+.4f} {one.returned - at:+.4f} {one.caller} {one.kind} {str(one.arguments)[:120]} -> {one.result}"
        for one in around[-40:]
    ]
    return "\n".join(lines)


def unfenced(source: str) -> str:
    return source.replace("~= ARGV[3] then return {'fenced'}", "== 'never' then return {'fenced'}")


def not_void(source: str) -> str:
    return source.replace("disown(owner)\nreturn {'ok', token}", "return {'ok', token}")


def token_twice(source: str) -> str:
    return source.replace(
        "call('INCR', e .. ':token')", "tonumber(call('GET', e .. ':token') or call('INCR', e .. ':token'))"
    )


@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "breaks"),
    [("write", unfenced), ("acquire", not_void), ("acquire", token_twice)],
    ids=["unfenced", "not void", "token twice"],
)
def test_broken_scripts_are_noticed(
    own_server: RedisServer, monkeypatch: pytest.MonkeyPatch, name: str, breaks: Any
) -> None:
    script: Script = {"write": scripts.WRITE, "acquire": scripts.ACQUIRE}[name]
    broken = breaks(script.source)
    assert broken != script.source
    monkeypatch.setattr(script, "source", broken)
    monkeypatch.setattr(script, "digest", hashlib.sha1(broken.encode(), usedforsecurity=False).hexdigest())
    for turn in range(5):
        with contextlib.suppress(KvyardError):
            world = Partitioned(own_server, SEED + turn)
            if order_of(world.run(12), world.begun) is None:
                return
    raise AssertionError("five histories of a broken script were all explained")
