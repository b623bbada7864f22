"""The socket of one request to a publisher's replay socket, with room in bytes for an answer that isn't read at once.

ZeroMQ bounds what waits in a socket by number alone, and publishers drop what a slow reader has no room for. So there are
several *rooms*: many messages that are short, or few that may be long, each with the same bytes in all. A message that is
longer than a room allows ends the connection; the next request is then made with longer ones.
"""

from typing import Any, NamedTuple

from kvyard.events.transport.frames import request
from kvyard.events.transport.zeromq import attach, require

QUEUE_BYTES = 1 << 30
"""Bytes of messages that may wait in a socket."""
COUNTS = (10_000, 1_000)
"""Messages that may wait in the first rooms. vLLM keeps 10,000 by default."""


class Room(NamedTuple):
    """Capacity of a socket's queue."""

    messages: int
    each: int
    """Bytes of the longest."""


def rooms(frame_bytes: int) -> list[Room]:
    """Return rooms from many short messages to few long ones, of which the longest has ``frame_bytes``; ``QUEUE_BYTES`` in
    each.
    """
    small = [Room(count, QUEUE_BYTES // count) for count in COUNTS if QUEUE_BYTES // count < frame_bytes]
    return [*small, Room(max(1, QUEUE_BYTES // frame_bytes), frame_bytes)]


class ReplaySocket:
    """One request, sent when it is made. To be closed."""

    def __init__(self, context: Any, endpoint: str, word: bytes | int, room: Room) -> None:
        """Raises ``KvyardError`` where ``endpoint`` can't be connected to."""
        zmq = require()
        self.room = room
        self.socket = context.socket(zmq.DEALER)
        self.monitor: Any = None
        try:
            self.socket.setsockopt(zmq.RCVHWM, room.messages)
            self.socket.setsockopt(zmq.MAXMSGSIZE, room.each)
            self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            attach(self.socket, endpoint, bind=False)
            self.socket.send_multipart(request(word), zmq.NOBLOCK)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give it up, with whatever waits in it."""
        if self.monitor is not None:
            self.socket.disable_monitor()
            self.monitor.close(linger=0)
        self.socket.close(linger=0)
