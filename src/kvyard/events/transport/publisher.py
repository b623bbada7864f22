"""The publisher: an engine's batches out to subscribers, without the engine ever waiting for one.

``publish`` puts a batch into a bounded queue and returns. A thread of its own encodes and sends, answers replay and
snapshot requests, and keeps what those need. When the queue is full it is emptied and the whole map is announced again: the
sequence shows a gap, then comes a clear and the map, in ordinary batches that every reader of vLLM's stream understands.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any

import msgspec

from kvyard.clock import WallClock
from kvyard.errors import KvyardError
from kvyard.events.outbox import Outbox
from kvyard.events.transport.frames import Frame
from kvyard.events.transport.outlet import Archive, Outlet, OutletThread
from kvyard.events.types import EventBatch
from kvyard.events.wire import WIRES, Encoder


class Publisher(OutletThread):
    """One stream's sending side. ``start`` and ``close`` it, or use it in a ``with`` block, ``async`` or not."""

    role = "publisher"

    def __init__(
        self,
        endpoint: str,
        recover: Callable[[int], EventBatch],
        *,
        replay: str | None = None,
        topic: str = "",
        rank: int = 0,
        epoch: int | None = None,
        dialect: str = "vllm",
        integers: bool = True,
        hwm: int = 100_000,
        bind: bool | None = None,
        buffer_steps: int = 10_000,
        max_events: int = 100_000,
        snapshots: bool = True,
    ) -> None:
        """Opens and starts nothing yet.

        ``recover`` announces the whole map again (``Batcher.resync``); it runs in the thread that publishes. ``rank`` moves
        both endpoints and is written into batches that name none. ``epoch`` is the time, in nanoseconds, unless given.
        ``bind`` overrules what the endpoint says about who binds. ``buffer_steps`` batches are kept for replay,
        ``max_events`` may wait to be sent. Raises ``KvyardError``.
        """
        if not WIRES.get(dialect).streamed:
            raise KvyardError(f"wire format {dialect!r} is fetched, not streamed: choose another, such as vllm")
        self.epoch = WallClock.since_epoch().now() if epoch is None else epoch
        self.rank = rank
        self.withhold: Callable[[EventBatch], bool] | None = None
        """Asked of every batch, in the thread: one that is withheld is kept for replay and not sent. For tests of readers."""
        self._recover = recover
        self._topic = topic.encode()
        self._clock = WallClock.since_epoch()
        self._encoder = Encoder(dialect, integers=integers)
        self._archive = Archive(
            topic=self._topic,
            rank=rank,
            epoch=self.epoch,
            batches=buffer_steps,
            snapshots=snapshots,
            integers=integers,
        )
        self._outbox = Outbox(recover, max_events)
        super().__init__(Outlet(endpoint, self._archive, replay=replay, rank=rank, hwm=hwm, bind=bind))
        self._failed = False

    def publish(self, batch: EventBatch, now: int | None = None) -> bool:
        """Queue ``batch``; never waits. Returns false if the queue was full: everything will be announced again then.

        ``now`` is the time stamp of that announcement. Raises ``KvyardError`` if the publisher isn't running.
        """
        if self._waker is None or self._stopping:
            raise KvyardError("the publisher is not running")
        now = self._clock.now() if now is None else now
        if self._failed:
            self._failed = False
            batch = self._recover(now)
        fits = self._outbox.offer(batch, now)
        self._waker.wake()
        return fits

    def counters(self) -> dict[str, int]:
        """Return all counters by name."""
        outlet, archive, outbox = self.outlet.counters, self._archive.counters, self._outbox.counters
        named = {name: getattr(part, name) for part in (outbox, outlet, archive) for name in part.__struct_fields__}
        return {**named, "failures": self.failures}

    async def __aenter__(self) -> "Publisher":
        return self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def _work(self, *inputs: Any) -> bool:
        batch = self._outbox.take()
        if batch is not None:
            self._send(batch)
        return batch is not None

    def _send(self, batch: EventBatch) -> None:
        try:
            if batch.rank is None:
                batch = msgspec.structs.replace(batch, rank=self.rank)
            payload = self._encoder.encode(batch)
            if self.withhold is None or not self.withhold(batch):
                self.outlet.send(Frame(self._topic, batch.seq, payload).parts())
            self._archive.keep(batch.seq, payload, batch.events)
        except Exception as error:
            # The loss shows as a gap. The next batch to be published becomes the whole map instead.
            self.error = error
            self.failures += 1
            self._failed = True
