"""Records: what the writer of a stream tells all readers about it, beside the rows."""

from __future__ import annotations

import msgspec

from kvyard.blocks.spec import GroupSpec
from kvyard.events.transport import State
from kvyard.index.places import Holder, Place
from kvyard.index.stream import Source


class FeedRecord(msgspec.Struct, frozen=True):
    """What one stream feeds of one holder."""

    holder: Holder
    places: tuple[Place, ...]
    groups: tuple[tuple[int | None, GroupSpec | None], ...]
    """As learned from events."""


class StreamRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One (stream, topic): whose it is, and how far its rows can be trusted."""

    source: Source
    state: State
    reason: str
    seq: int
    feeds: tuple[FeedRecord, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StreamRecord)


def write(record: StreamRecord) -> bytes:
    """A record as text for the server."""
    return _encoder.encode(record)


def read(text: bytes) -> StreamRecord | None:
    """A record from the server; ``None`` for what is none, so that it speaks for nothing."""
    try:
        return _decoder.decode(text)
    except msgspec.MsgspecError:
        return None


def field(stream: str, topic: str | None) -> bytes:
    """The name of a record among those of its owner; without a topic for a stream of which nothing was heard."""
    return msgspec.json.encode([stream, topic])
