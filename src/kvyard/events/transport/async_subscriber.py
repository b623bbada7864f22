"""The subscriber for asyncio: the same streams, states and recovery, awaited instead of waited for.

It has no task of its own: all work is done while ``receive`` is awaited, and cancelling that loses nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

from kvyard.clock import MS, Clock, WallClock, from_seconds
from kvyard.errors import KvyardError
from kvyard.events.transport.state import Limits, State, StreamStatus, Update
from kvyard.events.transport.subscription import Subscription, SubscriptionCounters
from kvyard.events.transport.wiring import READ_AT_ONCE, Wiring, note_connection
from kvyard.events.transport.zeromq import require
from kvyard.events.wire import Decoder


class AsyncSubscriber:
    """One subscription on an event loop. Use it in an ``async with`` block and iterate with ``async for``."""

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
        """As ``Subscriber``; ``context`` is an ordinary one, whose sockets are then awaited. Raises ``KvyardError``."""
        Decoder(dialect)
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
        self._open = False

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

    def open(self) -> AsyncSubscriber:
        """Subscribe; to be called on the event loop. Raises ``KvyardError`` where that can't be done."""
        zmq = require()
        import zmq.asyncio  # noqa: F811

        context = self._context or zmq.Context.instance()
        self._wiring.open(zmq.asyncio.Context(context))
        self._open = True
        self.subscription.start(self._clock.now())
        return self

    async def receive(self, timeout: float | None = None) -> Update | None:
        """The next update, waiting up to ``timeout`` seconds (``None``: for ever); ``None`` where there is none.

        Raises ``KvyardError`` where it isn't open.
        """
        subscription, clock = self.subscription, self._clock
        updates = subscription.updates
        until = None if timeout is None else clock.now() + from_seconds(timeout)
        while not updates:
            if not self._open:
                raise KvyardError("the subscriber is not open")
            now = clock.now()
            subscription.tick(now)
            self._wiring.adjust(subscription)
            if updates:
                break
            dues = [due for due in (until, subscription.due) if due is not None]
            await self._poll(-(-max(0, min(dues) - now) // MS) if dues else None)
            if not updates and until is not None and clock.now() >= until:
                break
        return updates.popleft() if updates else None

    async def __aiter__(self) -> AsyncIterator[Update]:
        """Updates, until it is closed."""
        while self._open:
            update = await self.receive()
            if update is not None:
                yield update

    def close(self) -> None:
        """Close every socket; closing twice does nothing more."""
        self._open = False
        self._wiring.close()

    async def __aenter__(self) -> AsyncSubscriber:
        return self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    async def _poll(self, ms: int | None) -> None:
        """Wait for something to arrive and take it in."""
        zmq = require()
        wiring = self._wiring
        poller = zmq.asyncio.Poller()
        for socket in wiring.watched():
            poller.register(socket, zmq.POLLIN)
        ready = dict(await poller.poll(ms))
        now = self._clock.now()
        if wiring.monitor in ready:
            for parts in await _read(wiring.monitor):
                note_connection(parts, self.subscription, now)
        for number, dealer in list(wiring.dealers.items()):
            if dealer in ready:
                for parts in await _read(dealer):
                    self.subscription.reply(number, parts, now)
        if wiring.sub in ready:
            for parts in await _read(wiring.sub):
                self.subscription.message(parts, now)


async def _read(socket: Any) -> list[list[bytes]]:
    zmq = require()
    found: list[list[bytes]] = []
    while len(found) < READ_AT_ONCE:
        try:
            found.append(await socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            break
    return found
