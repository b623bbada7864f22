"""Listeners: each is one stream's subscriber and the task that carries its updates into the index; a model has several.

All listeners share the event loop with the requests that ask, so none may keep it for long: after a few milliseconds of
updates others get their turn. What arrives meanwhile waits in ZeroMQ's queue, which is bounded; what doesn't fit is lost,
seen as a gap, and asked for.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from kvyard.clock import MS, Clock, pause
from kvyard.events.packed import PIECE, PackedEvents, pieces_of
from kvyard.events.slices import blocks_of
from kvyard.events.transport import Origin, State, Subscriber, Update
from kvyard.events.types import Cleared, Event, Stored
from kvyard.index import Holder, Indexer, Source
from kvyard.index.stream import SEVERITY, FollowedStream, in_slices
from kvyard.server.indexer.config import TIERS, Patience
from kvyard.server.indexer.schemas import InstanceId, ListenerInfo, Register
from kvyard.server.supervisor import Supervised, Supervisor, error_text

TURN = 5 * MS
"""Time for which updates are applied before other tasks have their turn."""
SLICE = 512
"""Blocks of an update that are applied together."""


class Listener:
    """Follows one stream for one index."""

    def __init__(
        self, source: Source, registration: Register, indexer: Indexer, patience: Patience, clock: Clock
    ) -> None:
        """Opens nothing yet. ``registration`` is the one of one rank. Raises ``KvyardError`` for what is no endpoint."""
        self.source = source
        self.registration = registration
        self.applied = 0
        self.block_sizes: set[int] = set()
        """By events."""
        self._indexer = indexer
        self._patience = patience
        self._tier = None if registration.tier is None else TIERS[registration.tier]
        self._clock = clock
        self._kept: Supervised | None = None
        self._damaged = False
        """True if an update failed, so that the index's state of the stream is unreliable."""
        self.subscriber = self._subscriber()

    def _subscriber(self) -> Subscriber:
        registration, patience = self.registration, self._patience
        return Subscriber(
            registration.endpoint,
            replay=registration.replay_endpoint,
            topic=registration.topic,
            dialect=registration.dialect,
            limits=patience.limits(),
            hwm=patience.queue,
            frame_bytes=patience.frame_bytes,
            stream=self.source.stream,
            clock=self._clock,
        )

    def start(self, supervisor: Supervisor) -> None:
        """Begin to apply."""
        if self._kept is None:
            self._kept = supervisor.keep(f"listener {self.source.stream}", self._run, self._failed)

    async def stop(self) -> None:
        """Apply nothing more and close the sockets. Twice does no harm."""
        if self._kept is not None:
            await self._kept.stop()
        self.subscriber.close()

    @property
    def error(self) -> str:
        """Why nothing is listened to just now; empty while it is."""
        return "" if self._kept is None else self._kept.reason

    @property
    def failures(self) -> int:
        """Return the number of times that listening failed and began again."""
        return 0 if self._kept is None else self._kept.failures

    async def _run(self) -> None:
        if self._damaged:
            self._begin_again()
        turn = self._clock.now() + TURN
        while True:
            update = await self.subscriber.receive()
            if update is None:
                continue
            for _ in self._applying(update):
                if self._clock.now() >= turn:
                    await pause()
                    turn = self._clock.now() + TURN
            del update  # it may be large, and the next one may be long in coming

    def _failed(self, error: Exception) -> None:
        """Ignore everything received until all of it was received again."""
        self._damaged = True
        self._indexer.lose(self.source.stream, f"listening failed: {error_text(error)}")

    def _begin_again(self) -> None:
        """Discard everything received, and request all of it. Raises what opening a socket raises."""
        self.subscriber.close()
        subscriber = self._subscriber()
        subscriber.open()
        self.subscriber = subscriber
        self._indexer.restart(self.source.stream)
        self._damaged = False

    def drain(self) -> None:
        """Apply what was read and waits for its turn."""
        updates = self.subscriber.subscription.updates
        while updates:
            self._apply(updates.popleft())

    def _apply(self, update: Update) -> None:
        for _ in self._applying(update):
            pass

    def _applying(self, update: Update) -> Iterator[None]:
        """Apply ``update``; stops where others may have their turn."""
        nameless = not update.topic and update.seq < 0 and not update.epoch
        if nameless and update.origin is Origin.STATE and (update.stream, "") not in self._indexer.streams:
            # No message yet, not even the topic. The index begins the stream itself, later, under the right name.
            yield
            return
        moved: list[Event] | PackedEvents = PackedEvents() if isinstance(update.events, PackedEvents) else []
        for events in pieces_of(update.events):
            self.block_sizes |= {event.block_size for event in events if isinstance(event, Stored)} - {0}
            if self._tier is not None:
                moved.extend(map(self._moved, events))
            if len(events) == PIECE:
                yield
        if self._tier is not None and update.events:
            update = msgspec.structs.replace(update, events=moved)
        if len(update.events) > SLICE or blocks_of(update.events) > SLICE:
            for slice_ in in_slices(update, SLICE):
                self._indexer.apply(slice_, self._clock.now())
                yield
        else:
            self._indexer.apply(update, self._clock.now())
            yield
        self.applied += 1

    def _moved(self, event: Any) -> Event:
        """Return ``event`` in the tier that the stream was registered for."""
        return event if isinstance(event, Cleared) else msgspec.structs.replace(event, tier=self._tier)

    # -- what there is to see ---------------------------------------------------------------------------------------

    @property
    def status(self) -> Literal["pending", "active", "failed"]:
        """In Dynamo's words."""
        if self.error:
            return "failed"
        counters = self.subscriber.counters
        return "active" if counters.connections > counters.disconnections else "pending"

    @property
    def waiting(self) -> int:
        """Batches that were read and can't be applied yet."""
        return len(self.subscriber.subscription.updates) + sum(status.held for status in self.subscriber.statuses())

    @property
    def known(self) -> Sequence[FollowedStream]:
        """Return the index's state of this stream, by topic."""
        return self._indexer.topics.get(self.source.stream, ())

    def total(self, name: str) -> int:
        """Return a counter of the subscriber's, over all topics."""
        return sum(getattr(status.counters, name) for status in self.subscriber.statuses())

    def info(self) -> ListenerInfo:
        known = self.known
        worst = max(known, key=lambda stream: SEVERITY[stream.state], default=None)
        if worst is not None:
            state, reason = worst.state, worst.reason
        else:
            heard = next(iter(self.subscriber.statuses()), None)
            state, reason = State.STALE, "nothing received yet" if heard is None else heard.reason
        configured = self.registration.block_size
        return ListenerInfo(
            name=self.registration.stream,
            endpoint=self.registration.endpoint,
            replay_endpoint=self.registration.replay_endpoint,
            status=self.status,
            state=state.value,
            reason=self.error or reason,
            sequence=max((stream.seq for stream in known), default=-1),
            batches=self.applied,
            block_sizes=[] if configured is None else sorted(size for size in self.block_sizes if size != configured),
        )


class IndexedModel(msgspec.Struct, eq=False):
    """One (model, tenant) and its workers."""

    name: str
    tenant: str
    indexer: Indexer
    listeners: dict[str, Listener] = {}
    """By stream."""
    ids: dict[str, InstanceId] = {}
    """Instances as they were registered, by the name they have in the index: 1 and "1" are one instance."""

    @property
    def label(self) -> str:
        return f"{self.name}:{self.tenant}"

    def holders(self, wanted: Iterable[InstanceId] | None) -> list[Holder] | None:
        """Return the workers of ``wanted`` instances; ``None`` for all. Unknown instances have none."""
        if wanted is None:
            return None
        names = set(map(str, wanted))
        self.indexer.refresh()
        return [holder for holder in self.indexer.scorer.standings if not holder.shared and holder.name in names]
