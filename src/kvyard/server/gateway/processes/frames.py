"""Frames: messages between a process of a gateway and the parent, over a pair of connected sockets that no other process
has.

A frame has a kind, a peer and a body. On its way to the hub the peer is the receiver, from the hub on it is the sender: the
hub passes on what isn't for itself, and reads none of it.
"""

import enum
import struct

HUB = 0
"""The parent, as a peer. Processes count from 1."""
ALL = 255
"""All other processes, as a peer."""
_HEADER = struct.Struct("<IBB")


class FrameKind(enum.IntEnum):
    """Kind of a frame."""

    READY = 1
    """To the hub: requests are answered. The body is the number of engines."""
    JOINED = 2
    """From the hub: the process named in the body is there, and knows nothing yet."""
    GONE = 3
    """From the hub: that process is gone, with all its requests in flight."""
    BOOKINGS = 4
    FOUND = 5
    """Finding of a process about an engine."""
    CHANGE = 6
    """A change by an operator. To the hub, and from there to all in one order, the sender included."""
    CHANGED = 7
    """To the hub: a change of the process in the body's first byte was made here, and holds for processes that join later."""
    ASK = 8
    ANSWER = 9
    SEEN = 10
    """To the hub: where a response is."""
    KEEP = 11
    """To the hub: a process's counters, in case it ends."""
    RECORD = 12
    LINES = 13
    """To the hub: lines of the access log."""
    SETTLE = 14
    """To the hub: what a request took of its rates in the end."""
    END = 15
    """From the hub: answer the requests in flight, and end."""
    HURRY = 16
    RELOAD = 17
    RESTATE = 18
    """From the hub: frames to the process in the body were lost; send it everything again."""
    CONFIG = 19
    """To the hub: the settings that are in force since a file was read again."""


LOSSY = frozenset({FrameKind.BOOKINGS, FrameKind.FOUND, FrameKind.ASK, FrameKind.ANSWER})
"""Kinds that are left out if a process doesn't keep up; it receives all of it again later."""
WRITTEN = frozenset({FrameKind.RECORD, FrameKind.LINES})
"""Kinds that the hub writes to files, and that are left out if it doesn't keep up."""


def frame(kind: FrameKind, peer: int, body: bytes = b"") -> bytes:
    """Return a frame as bytes."""
    return _HEADER.pack(len(body), kind, peer) + body


class FrameReader:
    """Frames of what comes in pieces."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[tuple[FrameKind, int, bytes]]:
        """Return the frames that are whole with ``data``: kind, peer, body."""
        held = self._held
        held += data
        frames: list[tuple[FrameKind, int, bytes]] = []
        offset = 0
        while len(held) - offset >= _HEADER.size:
            length, kind, peer = _HEADER.unpack_from(held, offset)
            end = offset + _HEADER.size + length
            if len(held) < end:
                break
            frames.append((FrameKind(kind), peer, bytes(held[offset + _HEADER.size : end])))
            offset = end
        if offset:
            del held[:offset]
        return frames
