"""The subscriber: a stream's updates in order, with gaps closed behind the scenes or owned up to.

It has no thread: all work is done in ``receive``, by whoever calls it. A caller that stays away for long loses batches to
the socket's high-water mark, as with any subscriber, and then sees them recovered.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any

from kvyard.clock import MS, Clock, WallClock, from_seconds
from kvyard.errors import KvyardError
from kvyard.events.transport.state import Limits, State, StreamStatus, Update
from kvyard.events.transport.subscription import Subscription, SubscriptionCounters
from kvyard.events.transport.waker import Waker
from kvyard.events.transport.wiring import READ_AT_ONCE, Wiring, note_connection
from kvyard.events.transport.zeromq import require
from kvyard.events.wire import Decoder


class Subscriber:
    """One subscription over real sockets. ``open`` and ``close`` it, or use it in a ``with`` block. Used by one thread."""

    def __init__(
        self,
        endpoint: str,
        *,
        replay: str | None = None,
        topic: str = "",
        rank: int = 0,
        dialect: str = "auto",
        narrow: bool = False,
        hwm: int = 100_000,
        limits: Limits | None = None,
        stream: str | None = None,
        clock: Clock | None = None,
        context: Any = None,
    ) -> None:
        """Nothing is opened yet.

        ``replay`` is where the publisher answers for what was missed; without it a gap makes the stream stale. ``topic`` is
        a prefix. ``rank`` moves both endpoints. ``dialect`` and ``narrow`` are the decoder's. ``stream`` names what comes
        out, the endpoint unless given. Raises ``KvyardError`` for what can't be an endpoint or a dialect.
        """
        Decoder(dialect)  # refuses an unknown one here, where somebody can act on it
        self._wiring = Wiring(endpoint, replay=replay, topic=topic, rank=rank, hwm=hwm)
        self.subscription = Subscription(
            stream or self._wiring.endpoint,
            source=replay is not None,
            prefix=topic,
            limits=limits,
            decoder=lambda: Decoder(dialect, narrow=narrow),
        )
        self._clock = clock or WallClock()
        self._context = context
        self._waker: Waker | None = None
        self._stopped = False

    @property
    def endpoint(self) -> str:
        """Where the stream is; with the port that was found for port 0, once open."""
        return self._wiring.endpoint

    @property
    def state(self) -> State:
        """The worst state of any of its streams."""
        return self.subscription.state

    @property
    def counters(self) -> SubscriptionCounters:
        """Counts of what belongs to no stream; each stream's own are in its status."""
        return self.subscription.counters

    def statuses(self) -> list[StreamStatus]:
        """A look at every stream."""
        return self.subscription.statuses()

    def open(self) -> Subscriber:
        """Subscribe, and begin to ask for what was published before. Raises ``KvyardError`` where that can't be done."""
        if self._waker is not None or self._stopped:
            raise KvyardError("a subscriber opens once: make another")
        zmq = require()
        self._wiring.open(self._context or zmq.Context.instance())
        self._waker = Waker()
        self.subscription.start(self._clock.now())
        return self

    def receive(self, timeout: float | None = None) -> Update | None:
        """The next update, waiting up to ``timeout`` seconds (``None``: for ever); ``None`` where there is none.

        Raises ``KvyardError`` where it isn't open.
        """
        if self._waker is None:
            raise KvyardError("the subscriber is not open")
        subscription, clock = self.subscription, self._clock
        updates = subscription.updates
        until = None if timeout is None else clock.now() + from_seconds(timeout)
        while not updates:
            now = clock.now()
            subscription.tick(now)
            self._wiring.adjust(subscription)
            if updates or self._stopped:
                break
            dues = [due for due in (until, subscription.due) if due is not None]
            self._poll(-(-max(0, min(dues) - now) // MS) if dues else None)
            if not updates and until is not None and clock.now() >= until:
                break
        return updates.popleft() if updates else None

    def __iter__(self) -> Iterator[Update]:
        """Updates, until ``stop``."""
        while not self._stopped:
            update = self.receive()
            if update is not None:
                yield update

    def stop(self) -> None:
        """End the wait in ``receive`` and the iteration. The one thing that any thread may call."""
        self._stopped = True
        if self._waker is not None:
            self._waker.wake()

    def close(self) -> None:
        """Close every socket; closing twice does nothing more."""
        self._stopped = True
        self._wiring.close()
        if self._waker is not None:
            self._waker.close()
            self._waker = None

    def __enter__(self) -> Subscriber:
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _poll(self, ms: int | None) -> None:
        """Wait for something to arrive and take it in."""
        zmq = require()
        wiring, waker = self._wiring, self._waker
        assert waker is not None
        poller = zmq.Poller()
        for socket in (*wiring.watched(), waker.fileno()):
            poller.register(socket, zmq.POLLIN)
        ready = dict(poller.poll(ms))
        if waker.fileno() in ready:
            waker.rest()
        now = self._clock.now()
        # Connections first: whoever is new there may be another publisher.
        if wiring.monitor in ready:
            for parts in _read(wiring.monitor):
                note_connection(parts, self.subscription, now)
        for number, dealer in list(wiring.dealers.items()):
            if dealer in ready:
                for parts in _read(dealer):
                    self.subscription.reply(number, parts, now)
        if wiring.sub in ready:
            for parts in _read(wiring.sub):
                self.subscription.message(parts, now)


def _read(socket: Any) -> Iterator[list[bytes]]:
    zmq = require()
    for _ in range(READ_AT_ONCE):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
