"""Real sockets: an engine with its publisher, and readers that mirror it. Everything waits for what it needs, bounded."""

import asyncio
import time

import pytest
from tests.events.fake_map import FakeMap, token_chain
from tests.events.transport.blocking import BlockingSubscriber
from tests.waiting import eventually, retried

from kvyard.errors import KvyardError
from kvyard.events import Batcher, GroupMeta, Mirror, Tier
from kvyard.events.transport import Limits, Publisher, State, Subscriber
from kvyard.hashing import Run

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

LOOPBACK = "tcp://127.0.0.1:0"
PATIENCE = 60.0
"""Seconds that anything may take; the machine may be busy."""
QUICK = Limits(reply=500_000_000, cooldown=300_000_000, probe=100_000_000, probe_most=400_000_000)
"""Recovery without the pauses that are good manners in production."""


class Engine:
    """A map of copies that announces itself."""

    def __init__(self, endpoint=LOOPBACK, replay=LOOPBACK, **options) -> None:
        self.map = FakeMap()
        self.batcher = Batcher((GroupMeta(block_size=1), GroupMeta(block_size=1)), snapshot=self.map.snapshot)
        self.map.sink = self.batcher
        self.publisher = Publisher(endpoint, self.batcher.resync, replay=replay, **options)
        self.now = 0

    def __enter__(self) -> "Engine":
        retried(self.publisher.start, KvyardError)  # ZeroMQ gives an address back some time after its socket was closed
        return self

    def __exit__(self, *_) -> None:
        self.publisher.close()

    def enter(self, *names: int, group: int = 0, tier: Tier = Tier.G1) -> None:
        self.map.enter(Run(token_chain(*names)), group, tier)

    def leave(self, *names: int, group: int = 0, tier: Tier = Tier.G1) -> None:
        self.map.leave(Run(token_chain(*names)), group, tier)

    def iterate(self) -> None:
        batch = self.batcher.end_iteration(self.now)
        if batch is not None:
            self.publisher.publish(batch, self.now)

    def step(self, *names: int) -> None:
        """One iteration in which ``names`` come in."""
        self.enter(*names)
        self.iterate()

    def flush(self) -> None:
        """Wait until everything has left."""
        eventually(lambda: self.publisher._archive.last >= self.batcher._seq - 1)

    @property
    def endpoints(self) -> dict:
        return {"endpoint": self.publisher.endpoint, "replay": self.publisher.replay_endpoint}


class Reader:
    """A subscriber with its mirror."""

    def __init__(self, endpoint, replay=None, limits=QUICK, **options) -> None:
        self.subscriber = BlockingSubscriber(endpoint, replay=replay, limits=limits, **options)
        self.mirror = Mirror()
        self.updates = []

    def __enter__(self) -> "Reader":
        self.subscriber.open()
        return self

    def __exit__(self, *_) -> None:
        self.subscriber.close()

    def pump(self, timeout: float = 0.02) -> bool:
        update = self.subscriber.receive(timeout)
        if update is None:
            return False
        self.updates.append(update)
        self.mirror.apply(update.events)
        return True

    def until(self, question, doing=None) -> None:
        """Read until ``question()`` is true; ``doing()`` is done between looks."""
        stop = time.monotonic() + PATIENCE
        while not question():
            if time.monotonic() > stop:
                raise AssertionError(f"waited {PATIENCE:g} s in vain: {self.subscriber.statuses()}")
            if doing is not None:
                doing()
            if self.pump():
                # Looking may be costly: read what there is first.
                for _ in range(1000):
                    if not self.pump(0):
                        break

    def until_whole(self, engine: Engine, doing=None) -> None:
        self.until(lambda: self.state == State.FRESH and self.mirror.held == engine.map.held(), doing)

    @property
    def state(self) -> State:
        return self.subscriber.state

    @property
    def counters(self):
        (status,) = self.subscriber.statuses()
        return status.counters


async def read_until(subscriber: Subscriber, mirror: Mirror, question) -> None:
    async def read() -> None:
        while not question():
            update = await subscriber.receive(0.05)
            if update is not None:
                mirror.apply(update.events)

    await asyncio.wait_for(read(), PATIENCE)
