"""Faults in a whole fleet of processes: engines that publish, replicas that write, a server, and somebody who only reads.

The reader is in this process; engines too, because they are the oracle. Replicas are processes, so that they can be killed.
After each fault the reader must be right again, and from the limit on it must never again promise more than an engine has.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import retried

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.index.fleet import PRESETS, Engine, prompts_of
from tests.index.redis.server import RedisServer
from tests.index.redis.shape import IDENTITY, NAMESPACE, PRESET
from tests.index.redis.support import PATIENCE, until

from kvyard.errors import KvyardError
from kvyard.events.transport import Publisher
from kvyard.index import Holder
from kvyard.index.redis import SharedIndexer

pytestmark = [pytest.mark.redis, pytest.mark.zmq]

ROOT = Path(__file__).parents[3]
PROMPTS = prompts_of(random.Random(5))


class Worker:
    """An engine and its publisher, at one address whatever becomes of them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.generation = 0
        self._begin("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
        self.endpoint, self.replay = self.publisher.endpoint, self.publisher.replay_endpoint

    def _begin(self, endpoint: str, replay: str) -> None:
        self.engine = Engine(self.name, PRESETS[PRESET], seed=self.generation)

        def start() -> Publisher:
            return Publisher(endpoint, self.engine.batcher.resync, replay=replay, hwm=50).start()

        self.publisher = retried(
            start, KvyardError
        )  # ZeroMQ gives an address back some time after its socket was closed

    def restart(self) -> None:
        assert self.replay is not None
        self.publisher.close()
        self.generation += 1
        self._begin(self.endpoint, self.replay)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            batch = self.engine.step(PROMPTS)
            if batch is not None:
                self.publisher.publish(batch, 0)


class Fleet:
    """One worker, replicas that write it, and a reader."""

    def __init__(self, server: RedisServer, lease: float) -> None:
        self.server = server
        self.lease = lease
        self.worker = Worker("w")
        self.holder = Holder("w")
        self.replicas: list[subprocess.Popen[bytes]] = []
        self.reader = SharedIndexer(
            server.url, IDENTITY, namespace=NAMESPACE, lease=lease, timeout=1.0, backoff=0.2, replica="the reader"
        )

    def add_replicas(self, count: int = 1) -> None:
        """Start so many, and wait until all are ready."""
        begun = [self._start() for _ in range(count)]
        for process in begun:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"

    def _start(self) -> subprocess.Popen[bytes]:
        worker = self.worker
        assert worker.replay is not None
        command = [sys.executable, "-m", "tests.index.redis.replica", self.server.url, str(self.lease)]
        command += [worker.name, worker.endpoint, worker.replay]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        self.replicas.append(process)
        return process

    def claims(self) -> list[int]:
        """Return the reader's answer for each prompt."""
        self.reader.tick()
        found = [self.reader.score(prompt).workers.get(self.holder) for prompt in PROMPTS]
        return [0 if match is None or not match.score else match.tokens for match in found]

    def truth(self) -> list[int]:
        return [self.worker.engine.longest(prompt) for prompt in PROMPTS]

    def is_right(self) -> bool:
        return self.claims() == self.truth()

    def settle(self, what: str, since: float | None = None) -> None:
        """Wait until the reader is right, and print how long that took."""
        since = time.monotonic() if since is None else since
        until(self.is_right, lambda: (what, self.claims(), self.truth(), self.reader.score(PROMPTS[0]).workers))
        print(f"{what}: right after {(time.monotonic() - since) * 1000:.0f} ms, lease {self.lease} s")

    def writer(self) -> subprocess.Popen[bytes]:
        """The replica that has the lease."""
        found: list[subprocess.Popen[bytes]] = []

        def seen() -> bool:
            # Where the machine is busy, a lease can run out for a moment.
            self.reader.backend.session.look(now=True)
            owner = self.reader.backend.directory.owners.get("worker w")
            found[:] = [one for one in self.replicas if owner is not None and f"-{one.pid}-" in owner.replica]
            return bool(found)

        until(seen)
        return found[0]

    def never_too_much(self, seconds: float) -> None:
        """The engine stands still, and for a while no answer promises more than it has."""
        truth, stop = self.truth(), time.monotonic() + seconds
        while time.monotonic() < stop:
            claims = self.claims()
            assert all(claim <= true for claim, true in zip(claims, truth, strict=True)), (claims, truth)
            time.sleep(0.005)

    def close(self) -> None:
        self.reader.close()
        for process in self.replicas:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
        self.worker.publisher.close()


@contextlib.contextmanager
def fleet_on(server: RedisServer, replicas: int, lease: float) -> Iterator[Fleet]:
    fleet = Fleet(server, lease)
    try:
        fleet.add_replicas(replicas)
        while not any(fleet.truth()):
            fleet.worker.step(10)
        fleet.settle("start")
        yield fleet
    finally:
        fleet.close()


LEASES = [pytest.param(0.4, id="quick"), pytest.param(3.0, id="5 s", marks=pytest.mark.slow)]
"""The lease, short where time is; the limit is 5 s with the default one of 3 s."""


def limit(lease: float) -> float:
    return 5.0 if lease == 3.0 else 3 * lease


def wait_until(then: float) -> None:
    time.sleep(max(0.0, then - time.monotonic()))


@pytest.mark.parametrize("lease", LEASES)
def test_the_server_is_killed_and_restarted(own_server: RedisServer, lease: float) -> None:
    with fleet_on(own_server, 1, lease) as fleet:
        fleet.worker.step(20)
        own_server.kill()
        fleet.worker.step(20)
        time.sleep(0.05)
        fleet.worker.step(20)
        # Nothing can be asked, so nothing is promised.
        fleet.never_too_much(0.2)
        own_server.start()
        fleet.settle("redis-server killed with -9 and restarted", time.monotonic())
        fleet.worker.step(20)
        fleet.settle("and going on")


@pytest.mark.parametrize("lease", LEASES)
def test_the_server_is_killed_while_batches_come(own_server: RedisServer, lease: float) -> None:
    """The same in mid-stream, with two replicas, and an old dump that it comes back with."""
    with fleet_on(own_server, 2, lease) as fleet:
        own_server.ask("SAVE")
        for _ in range(30):
            fleet.worker.step()
            time.sleep(0.002)
        own_server.kill()
        for _ in range(30):
            fleet.worker.step()
            time.sleep(0.002)
        own_server.start()
        started = time.monotonic()
        first = 0.0
        while (now := time.monotonic()) < started + limit(lease) or not first:
            assert now < started + PATIENCE, "no answer at all"
            fleet.worker.step()
            time.sleep(0.01)
            if not first and any(fleet.claims()):
                first = time.monotonic() - started
        print(f"redis-server killed in mid-stream, back with an old dump: answers again after {first * 1000:.0f} ms")
        fleet.settle("and right once batches ceased")
        fleet.never_too_much(0.2)


@pytest.mark.parametrize("lease", LEASES)
def test_the_subscriber_is_stalled(own_server: RedisServer, lease: float) -> None:
    """The writer stands still beyond its lease, while more is published than the socket keeps."""
    with fleet_on(own_server, 1, lease) as fleet:
        fleet.writer().send_signal(signal.SIGSTOP)
        fleet.worker.step(1500)
        until(lambda: not any(fleet.claims()))
        fleet.never_too_much(0.2)
        fleet.replicas[0].send_signal(signal.SIGCONT)
        woken = time.monotonic()
        fleet.settle("subscriber stalled and woken", woken)
        wait_until(woken + limit(lease))
        fleet.never_too_much(0.2)


@pytest.mark.parametrize("lease", LEASES)
def test_the_publisher_is_restarted(own_server: RedisServer, lease: float) -> None:
    """Its sequence starts at 0 again, and its cache empty."""
    with fleet_on(own_server, 1, lease) as fleet:
        fleet.worker.restart()
        back = time.monotonic()
        while not any(fleet.truth()):
            fleet.worker.step(5)
        fleet.settle("publisher restarted with sequence 0", back)
        fleet.never_too_much(0.2)


@pytest.mark.parametrize("lease", LEASES)
def test_a_replica_is_killed_between_two_writes(own_server: RedisServer, lease: float) -> None:
    """A standby that followed takes over. Until the lease is over the dead one's rows stand, and no longer."""
    with fleet_on(own_server, 2, lease) as fleet:
        fleet.worker.step(15)
        victim = fleet.writer()
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        killed = time.monotonic()
        fleet.worker.step(60)
        fleet.settle("writer killed with -9, a standby took over", killed)
        assert fleet.writer() is not victim
        wait_until(killed + limit(lease))
        fleet.never_too_much(0.2)


@pytest.mark.parametrize("lease", LEASES)
def test_a_writer_sleeps_and_wakes_up_replaced(own_server: RedisServer, lease: float) -> None:
    """It is in the middle of whatever it did, believes in its lease, and must not get a word in."""
    with fleet_on(own_server, 2, lease) as fleet:
        sleeper = fleet.writer()
        sleeper.send_signal(signal.SIGSTOP)
        asleep = time.monotonic()
        fleet.worker.step(60)
        fleet.settle("writer stopped, a standby took over", asleep)
        assert fleet.writer() is not sleeper
        sleeper.send_signal(signal.SIGCONT)
        fleet.never_too_much(0.3)
        fleet.worker.step(30)
        fleet.settle("and with both awake")
        if lease > 1:  # the other may be held up for longer than the short one, and then it is the sleeper's turn
            assert fleet.writer() is not sleeper


@pytest.mark.parametrize("lease", LEASES)
def test_the_only_replica_is_killed_and_replaced(own_server: RedisServer, lease: float) -> None:
    """Nobody followed meanwhile: the new one starts with nothing and learns all from the publisher."""
    with fleet_on(own_server, 1, lease) as fleet:
        fleet.writer().send_signal(signal.SIGKILL)
        killed = time.monotonic()
        fleet.worker.step(60)
        until(lambda: not any(fleet.claims()))
        fleet.add_replicas()
        fleet.settle("the only writer killed with -9, another started", killed)
        wait_until(killed + limit(lease))
        fleet.never_too_much(0.2)
