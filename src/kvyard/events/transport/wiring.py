"""The wiring of a subscriber: its SUB socket, a look at its connections, and one DEALER per request under way.

A request gets a socket of its own, so that the answers to one that was given up go nowhere. A DEALER, since a REQ socket
would read the first of many answers only.
"""

from __future__ import annotations

from typing import Any

from kvyard.events.transport.endpoint import at_rank, is_bound_by_subscriber
from kvyard.events.transport.frames import request
from kvyard.events.transport.subscription import Subscription
from kvyard.events.transport.zeromq import attach, require

READ_AT_ONCE = 256
"""Messages taken from a socket before the others get their turn."""


class Wiring:
    """Opens, adjusts and closes sockets. Reading them is left to the subscriber, which may be asynchronous."""

    def __init__(self, endpoint: str, *, replay: str | None, topic: str, rank: int, hwm: int) -> None:
        """Raises ``KvyardError`` for endpoints that ``rank`` can't have."""
        self.endpoint = at_rank(endpoint, rank)
        self.replay_endpoint = None if replay is None else at_rank(replay, rank)
        self.sub: Any = None
        self.monitor: Any = None
        self.dealers: dict[int, Any] = {}
        self._topic = topic.encode()
        self._hwm = hwm
        self._context: Any = None

    def open(self, context: Any) -> None:
        """Subscribe. Raises ``KvyardError``, with nothing left open, where an address can't be had."""
        zmq = require()
        self._context = context
        try:
            self.sub = context.socket(zmq.SUB)
            self.sub.setsockopt(zmq.RCVHWM, self._hwm)
            self.sub.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
            # Notice a peer that vanished without closing, as machines do.
            self.sub.setsockopt(zmq.HEARTBEAT_IVL, 5000)
            self.sub.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)
            self.sub.setsockopt(zmq.SUBSCRIBE, self._topic)
            self.monitor = self.sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            self.endpoint = attach(self.sub, self.endpoint, is_bound_by_subscriber(self.endpoint))
        except BaseException:
            self.close()
            raise

    def adjust(self, subscription: Subscription) -> None:
        """Make the requests that ``subscription`` wants, and give up those that it doesn't."""
        asks = subscription.asks
        if not asks and not self.dealers:
            return
        for number in [number for number in self.dealers if number not in asks]:
            self.dealers.pop(number).close(linger=0)
        for number, ask in asks.items():
            if number not in self.dealers:
                zmq = require()
                dealer = self.dealers[number] = self._context.socket(zmq.DEALER)
                dealer.setsockopt(zmq.RCVHWM, 0)
                attach(dealer, str(self.replay_endpoint), bind=False)
                dealer.send_multipart(request(ask.word), zmq.NOBLOCK)

    def watched(self) -> list[Any]:
        """The sockets to wait for."""
        return [self.monitor, self.sub, *self.dealers.values()]

    def close(self) -> None:
        """Close every socket; closing twice does nothing more."""
        for dealer in self.dealers.values():
            dealer.close(linger=0)
        self.dealers.clear()
        if self.sub is not None:
            self.sub.disable_monitor()
            self.sub.close(linger=0)
        if self.monitor is not None:
            self.monitor.close(linger=0)
        self.sub = self.monitor = None


def note_connection(parts: list[bytes], subscription: Subscription, now: int) -> None:
    """Tell ``subscription`` what a message of the monitor says."""
    zmq = require()
    from zmq.utils.monitor import parse_monitor_message

    event = parse_monitor_message(parts)["event"]
    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
        subscription.connected(now)
    elif event == zmq.EVENT_DISCONNECTED:
        subscription.disconnected()
