"""The subscriber: a stream's updates in order, with gaps closed, or reported.

It has no task of its own: all work is done while ``receive`` is awaited, and cancelling that loses nothing. A caller that
stays away for long loses batches to the socket's high-water mark, as with any subscriber, and then sees them recovered.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any

from kvyard.clock import MS, SECOND, Clock, WallClock, from_seconds
from kvyard.errors import KvyardError
from kvyard.events.transport.endpoint import at_rank, is_bound_by_subscriber
from kvyard.events.transport.replay_socket import QUEUE_BYTES, ReplaySocket, rooms
from kvyard.events.transport.state import Limits, State, StreamStatus, Update
from kvyard.events.transport.subscription import Subscription, SubscriptionCounters
from kvyard.events.transport.zeromq import attach, require, shared_context
from kvyard.events.wire import Decoder
from kvyard.events.wire.decoded import LARGE
from kvyard.integers import ceil_div

log = logging.getLogger(__name__)

READ_AT_ONCE = 256
"""Messages taken from a socket before the others get their turn."""
READ_BYTES = 1 << 20
"""Bytes read at a time; one message may have more."""
FRAME_BYTES = 16 << 20
"""Most bytes of a message: a publisher that sends more is disconnected."""
RECONNECT = SECOND
"""Time that ZeroMQ has to report that it reconnects by itself."""
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="events")
"""Reads large messages: one at a time, as each may take a hundred MiB meanwhile, of which Python keeps what lies between
objects that stay."""


class SubscriberSockets:
    """Carries messages from sockets to a ``Subscription`` and its requests to the publisher."""

    def __init__(
        self,
        endpoint: str,
        *,
        replay: str | None,
        topic: str = "",
        rank: int = 0,
        hwm: int = 0,
        frame_bytes: int = FRAME_BYTES,
    ) -> None:
        """Connect to a publisher. A message has at most ``frame_bytes``. At most ``hwm`` messages wait, and no more than
        fit into ``QUEUE_BYTES`` if each has the full length: the publisher keeps the others. Raises ``KvyardError`` for
        endpoints that ``rank`` can't have.
        """
        self._frame_bytes = frame_bytes
        most = max(1, QUEUE_BYTES // frame_bytes)
        hwm = min(hwm or most, most)
        self.endpoint = at_rank(endpoint, rank)
        self.replay_endpoint = None if replay is None else at_rank(replay, rank)
        self._topic = topic.encode()
        self._hwm = hwm
        self._context: Any = None
        self._sub: Any = None
        self._monitor: Any = None
        self._dealers: dict[int, ReplaySocket] = {}
        """By the number of their request."""
        self._rooms = rooms(frame_bytes)
        self._room = 0
        """Room that requests are made with."""
        self._cut: int | None = None
        """Time to reconnect by ourselves, after a connection broke."""

    def open(self) -> None:
        """Subscribe; to be called on the event loop. Raises ``KvyardError``, with nothing left open, if that fails."""
        zmq = require()
        import zmq.asyncio  # noqa: F811

        self._context = zmq.asyncio.Context(shared_context())
        try:
            self._sub = self._context.socket(zmq.SUB)
            self._sub.setsockopt(zmq.RCVHWM, self._hwm)
            self._sub.setsockopt(zmq.MAXMSGSIZE, self._frame_bytes)
            self._sub.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
            # Notice a peer that vanished without closing, as machines do. Not by ZeroMQ's heartbeats: a socket that has as many
            # messages as it may doesn't read them, gives a healthy connection up, and aborts the process when it is read again
            # (libzmq #3937). The kernel's are answered meanwhile.
            for option, value in ((zmq.TCP_KEEPALIVE, 1), (zmq.TCP_KEEPALIVE_IDLE, 5), (zmq.TCP_KEEPALIVE_INTVL, 5)):
                self._sub.setsockopt(option, value)
            self._sub.setsockopt(zmq.TCP_KEEPALIVE_CNT, 2)
            self._sub.setsockopt(zmq.SUBSCRIBE, self._topic)
            self._monitor = self._sub.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
            )
            self.endpoint = attach(self._sub, self.endpoint, is_bound_by_subscriber(self.endpoint))
        except BaseException:
            self.close()
            raise

    async def exchange(
        self,
        subscription: Subscription,
        until: int | None,
        clock: Clock,
        message: Callable[[Sequence[bytes], int], None] | None = None,
    ) -> None:
        """Make requests that are due, wait for messages up to the time ``until``, and hand in what arrived.

        ``message`` takes live messages in place of the subscription. Returns early with what the first socket to have
        something brings, or when the subscription is due.
        """
        now = clock.now()
        subscription.tick(now)
        self._adjust(subscription)
        if subscription.updates:
            return
        if self._cut is not None and now >= self._cut:
            self._connect_again()
        dues = [due for due in (until, subscription.due, self._cut) if due is not None]
        ready = await self._poll(
            [
                self._monitor,
                self._sub,
                *(socket for each in self._dealers.values() for socket in (each.socket, each.monitor)),
            ],
            ceil_div(max(0, min(dues) - now), MS) if dues else None,
        )
        now = clock.now()
        # Connections first: the publisher may be another one.
        if self._monitor in ready:
            for parts in await _read(self._monitor):
                self._note_connection(parts, subscription, now)
        for number, dealer in list(self._dealers.items()):
            if dealer.socket in ready:
                for parts in await _read(dealer.socket):
                    await _prepare(subscription, parts, now, number)
                    subscription.reply(number, parts, now)
            if dealer.monitor in ready and await _read(dealer.monitor):
                self._room_was_small(dealer)
        if self._sub in ready:
            for parts in await _read(self._sub):
                self._heard(parts)
                await _prepare(subscription, parts, now)
                (message or subscription.message)(parts, now)

    async def connected(self, seconds: float) -> bool:
        """Return true if a publisher is connected within ``seconds``; for use before the first ``exchange``."""
        return bool(await self._poll([self._monitor], round(seconds * 1000)))

    def close(self) -> None:
        """Close every socket; closing twice does nothing more."""
        for dealer in self._dealers.values():
            dealer.close()
        self._dealers.clear()
        if self._sub is not None:
            self._sub.disable_monitor()
            self._sub.close(linger=0)
        if self._monitor is not None:
            self._monitor.close(linger=0)
        self._sub = self._monitor = None

    def _note_connection(self, parts: list[bytes], subscription: Subscription, now: int) -> None:
        zmq = require()
        from zmq.utils.monitor import parse_monitor_message

        event = parse_monitor_message(parts)["event"]
        self._cut = None
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._room = 0  # it may be another publisher
            subscription.connected(now)
        elif event == zmq.EVENT_DISCONNECTED:
            subscription.disconnected()
            if not is_bound_by_subscriber(self.endpoint):
                self._cut = now + RECONNECT

    def _connect_again(self) -> None:
        """Reconnect: ZeroMQ doesn't retry a connection that broke its rules, as with a message that is too large."""
        zmq = require()
        self._cut = None
        log.warning(
            "%s was disconnected: a message was longer than %d bytes, or none of ZeroMQ's; it is connected to again",
            self.endpoint,
            self._frame_bytes,
        )
        with suppress(zmq.ZMQError):
            self._sub.disconnect(self.endpoint)
        attach(self._sub, self.endpoint, bind=False)

    def _adjust(self, subscription: Subscription) -> None:
        """Send the requests that ``subscription`` wants, and drop those that it no longer does."""
        requests, dealers = subscription.requests, self._dealers
        for number in [number for number in dealers if number not in requests]:
            dealers.pop(number).close()
        for number, wanted in requests.items():
            if number not in dealers:
                room = self._rooms[self._room]
                dealers[number] = ReplaySocket(self._context, str(self.replay_endpoint), wanted.word, room)

    def _room_was_small(self, dealer: ReplaySocket) -> None:
        """A request's connection broke. It may have been a message too long for its room, so the next has longer ones; this one
        gets no more, and is made again when its time is up.
        """
        if self._room < len(self._rooms) - 1 and self._rooms[self._room] == dealer.room:
            self._room += 1

    def _heard(self, parts: Sequence[bytes]) -> None:
        """A live message is here: one that was missed may be as long."""
        while self._room < len(self._rooms) - 1 and parts and len(parts[-1]) > self._rooms[self._room].each:
            self._room += 1

    async def _poll(self, sockets: list[Any], ms: int | None) -> dict[Any, int]:
        zmq = require()
        poller = zmq.asyncio.Poller()
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        return dict(await poller.poll(ms))


async def _read(socket: Any) -> list[list[bytes]]:
    zmq = require()
    messages: list[list[bytes]] = []
    size = 0
    # Asked beforehand: a read in vain leaves an exception and its frames in a circle, and with it what they refer to.
    while len(messages) < READ_AT_ONCE and size < READ_BYTES and socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
        messages.append(await socket.recv_multipart(zmq.NOBLOCK))
        size += len(messages[-1][-1])
    return messages


async def _prepare(subscription: Subscription, parts: Sequence[bytes], now: int, number: int | None = None) -> None:
    """Have a large message read in a thread, while others have their turn."""
    if parts and len(parts[-1]) > LARGE:
        decoder = subscription.decoder_of(parts, now, number)
        if decoder is not None:
            await asyncio.get_running_loop().run_in_executor(_THREAD, decoder.prepare, parts[-1])


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
        frame_bytes: int = FRAME_BYTES,
        limits: Limits | None = None,
        stream: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Opens nothing yet.

        ``replay`` is the publisher's endpoint for missed batches; without it a gap makes the stream stale. ``topic`` is a
        prefix. ``rank`` moves both endpoints. ``dialect`` is the decoder's. ``stream`` names what comes out, the endpoint
        unless given. Raises ``KvyardError`` for what can't be an endpoint or a dialect.
        """
        Decoder(dialect)  # refuses an unknown one here, where the caller can act on it
        self._sockets = SubscriberSockets(
            endpoint, replay=replay, topic=topic, rank=rank, hwm=hwm, frame_bytes=frame_bytes
        )
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
        """Return the stream's endpoint; once open, with the port that was chosen for port 0."""
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

    def open(self) -> "Subscriber":
        """Subscribe, and begin to ask for what was published before; to be called on the event loop.

        Raises ``KvyardError`` if that can't be done, and the second time.
        """
        if self._opened:
            raise KvyardError("a subscriber opens once: make another")
        self._sockets.open()
        self._open = self._opened = True
        self.subscription.start(self._clock.now())
        return self

    async def connected(self, seconds: float) -> bool:
        """Return true if a publisher is connected within ``seconds``; for use before the first ``receive``."""
        return await self._sockets.connected(seconds)

    async def receive(self, timeout: float | None = None) -> Update | None:
        """Return the next update, waiting up to ``timeout`` seconds (``None``: for ever); ``None`` if there is none.

        Raises ``KvyardError`` if it isn't open.
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
        """Yield updates until it is closed."""
        while self._open:
            update = await self.receive()
            if update is not None:
                yield update

    def close(self) -> None:
        """Close every socket; closing twice does nothing more."""
        self._open = False
        self._sockets.close()

    async def __aenter__(self) -> "Subscriber":
        return self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()
