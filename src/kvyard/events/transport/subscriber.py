"""The subscriber: a stream's updates in order, with gaps closed behind the scenes or owned up to.

It has no task of its own: all work is done while ``receive`` is awaited, and cancelling that loses nothing. A caller that
stays away for long loses batches to the socket's high-water mark, as with any subscriber, and then sees them recovered.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType

from kvyard.clock import Clock, WallClock, from_seconds
from kvyard.errors import KvyardError
from kvyard.events.transport.sockets import SubscriberSockets
from kvyard.events.transport.state import Limits, State, StreamStatus, Update
from kvyard.events.transport.subscription import Subscription, SubscriptionCounters
from kvyard.events.wire import Decoder


class Subscriber:
    """One subscription on an event loop. Use it in an ``async with`` block and iterate with ``async for``."""

    def __init__(
        self,
        endpoint: str,
        *,
        replay: str | None = None,
        topic: str = "",
        rank: int = 0,
        dialect: str = "auto",
        hwm: int = 100_000,
        limits: Limits | None = None,
        stream: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Nothing is opened yet.

        ``replay`` is where the publisher answers for what was missed; without it a gap makes the stream stale. ``topic`` is
        a prefix. ``rank`` moves both endpoints. ``dialect`` is the decoder's. ``stream`` names what comes
        out, the endpoint unless given. Raises ``KvyardError`` for what can't be an endpoint or a dialect.
        """
        Decoder(dialect)  # refuses an unknown one here, where the caller can act on it
        self._sockets = SubscriberSockets(endpoint, replay=replay, topic=topic, rank=rank, hwm=hwm)
        self.subscription = Subscription(
            stream or self._sockets.endpoint,
            source=replay is not None,
            prefix=topic,
            limits=limits,
            decoder=lambda: Decoder(dialect),
        )
        self._clock = clock or WallClock()
        self._open = self._opened = False

    @property
    def endpoint(self) -> str:
        """Where the stream is; with the port that was found for port 0, once open."""
        return self._sockets.endpoint

    @property
    def state(self) -> State:
        """The worst state of any of its streams."""
        return self.subscription.state

    @property
    def counters(self) -> SubscriptionCounters:
        """Counts of what belongs to no stream; each stream's own are in its status."""
        return self.subscription.counters

    def statuses(self) -> list[StreamStatus]:
        return self.subscription.statuses()

    def open(self) -> Subscriber:
        """Subscribe, and begin to ask for what was published before; to be called on the event loop.

        Raises ``KvyardError`` where that can't be done, and the second time.
        """
        if self._opened:
            raise KvyardError("a subscriber opens once: make another")
        self._sockets.open()
        self._open = self._opened = True
        self.subscription.start(self._clock.now())
        return self

    async def connected(self, seconds: float) -> bool:
        """Whether a publisher is there, waiting up to ``seconds`` for it. To be asked before the first ``receive``."""
        return await self._sockets.connected(seconds)

    async def receive(self, timeout: float | None = None) -> Update | None:
        """The next update, waiting up to ``timeout`` seconds (``None``: for ever); ``None`` where there is none.

        Raises ``KvyardError`` where it isn't open.
        """
        clock, updates = self._clock, self.subscription.updates
        until = None if timeout is None else clock.now() + from_seconds(timeout)
        while True:
            if not self._open:
                raise KvyardError("the subscriber is not open")
            if updates:
                return updates.popleft()
            await self._sockets.exchange(self.subscription, until, clock)
            if not updates and until is not None and clock.now() >= until:
                return None

    async def __aiter__(self) -> AsyncIterator[Update]:
        """Updates, until it is closed."""
        while self._open:
            update = await self.receive()
            if update is not None:
                yield update

    def close(self) -> None:
        """Close every socket; closing twice does nothing more."""
        self._open = False
        self._sockets.close()

    async def __aenter__(self) -> Subscriber:
        return self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()
