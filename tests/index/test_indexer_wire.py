"""End to end over sockets: managers with other names and block sizes than the index, two ranks each, loss and a restart."""

from __future__ import annotations

import contextlib
import random
import time

import pytest
from tests.waiting import eventually, retried

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.events.transport.blocking import BlockingSubscriber
from tests.index.fleet import PRESETS, Engine, prompts_of

from kvyard.errors import KvyardError
from kvyard.events.faults import Faults
from kvyard.events.transport import Limits, Publisher, State
from kvyard.events.transport.relay import FaultProxy
from kvyard.index import Holder, Identity, Indexer, Source

pytestmark = pytest.mark.zmq

LOOPBACK = "tcp://127.0.0.1:0"
PATIENCE = 60.0
QUICK = Limits(reply=500_000_000, cooldown=300_000_000, probe=100_000_000, probe_most=400_000_000)
PRESET = "full+window"


class Rank:
    """One rank of a worker: an engine, its publisher, and what reads it."""

    def __init__(
        self, stack: contextlib.ExitStack, indexer: Indexer, worker: str, rank: int, faults: Faults | None
    ) -> None:
        self.holder = Holder(worker, rank)
        self.indexer = indexer
        self.generation = 0
        self.publisher: Publisher | None = None
        self._begin(LOOPBACK, LOOPBACK)
        stack.callback(lambda: self.publisher and self.publisher.close())
        assert self.publisher is not None
        endpoint, replay = self.publisher.endpoint, self.publisher.replay_endpoint
        if faults is not None:
            proxy = stack.enter_context(FaultProxy(endpoint, LOOPBACK, faults, replay=LOOPBACK))
            endpoint, replay = proxy.endpoint, proxy.replay_endpoint
        name = str(self.holder)
        indexer.register(Source(stream=name, worker=worker, rank=rank, groups=PRESETS[PRESET], clear_scope="all"))
        self.subscriber = BlockingSubscriber(endpoint, replay=replay, limits=QUICK, stream=name)
        self.subscriber.open()
        stack.callback(self.subscriber.close)

    def _begin(self, endpoint: str, replay: str | None) -> None:
        seed = 100 * ord(self.holder.name) + 10 * self.holder.rank + self.generation
        self.engine = Engine(str(self.holder), PRESETS[PRESET], seed=seed)

        def start() -> Publisher:
            return Publisher(endpoint, self.engine.batcher.resync, replay=replay).start()

        self.publisher = retried(
            start, KvyardError
        )  # ZeroMQ gives an address back some time after its socket was closed

    def restart(self) -> None:
        assert self.publisher is not None
        endpoint, replay = self.publisher.endpoint, self.publisher.replay_endpoint
        self.publisher.close()
        self.generation += 1
        self._begin(endpoint, replay)

    def step(self, prompts: list[list[int]]) -> None:
        assert self.publisher is not None
        batch = self.engine.step(prompts)
        if batch is not None:
            self.publisher.publish(batch, 0)
        self.pump()

    def pump(self) -> None:
        while (update := self.subscriber.receive(0)) is not None:
            self.indexer.apply(update)

    def right(self, prompts: list[list[int]]) -> bool:
        """Return true if the index agrees with the rank itself."""
        self.pump()
        if self.subscriber.state != State.FRESH:
            return False
        matches = [self.indexer.score(prompt).workers[self.holder].tokens for prompt in prompts]
        return matches == [self.engine.longest(prompt) for prompt in prompts]


def test_scores_over_sockets_with_loss_and_a_restart() -> None:
    prompts = prompts_of(random.Random(5))
    indexer = Indexer(Identity(2))
    with contextlib.ExitStack() as stack:
        ranks = [
            Rank(
                stack, indexer, worker, rank, Faults(drop=0.2, duplicate=0.1, reorder=0.1, seed=rank) if rank else None
            )
            for worker in "ab"
            for rank in (0, 1)
        ]
        for turn in range(3):
            for _ in range(25):
                for rank in ranks:
                    rank.step(prompts)
                time.sleep(0.002)
            if turn == 1:
                ranks[0].restart()
                ranks[0].step(prompts)
            eventually(
                lambda: all(rank.right(prompts) for rank in ranks),
                lambda: [rank.subscriber.statuses() for rank in ranks],
            )
            indexer.check_integrity()
        assert any(rank.engine.longest(prompt) for rank in ranks for prompt in prompts)
