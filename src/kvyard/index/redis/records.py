"""Records: what the writer of a stream tells all readers about it beside the rows, when that changes and not otherwise."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import msgspec

from kvyard.blocks.spec import GroupSpec
from kvyard.events.transport import State
from kvyard.index.catalog import Catalog
from kvyard.index.places import Holder, Place, Places
from kvyard.index.redis.directory import owner_of
from kvyard.index.redis.rows import RedisIndex
from kvyard.index.stream import FollowedStream, Source

StreamKey: TypeAlias = tuple[str, str]
"""A stream's name and topic."""


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


@lru_cache(1 << 14)
def read(text: bytes) -> StreamRecord | None:
    """A record from the server; ``None`` for what is none, so that it speaks for nothing."""
    try:
        return _decoder.decode(text)
    except msgspec.MsgspecError:
        return None


class StreamRecords:
    """The records that this replica wrote of the streams whose leases it has."""

    def __init__(self, backend: RedisIndex, places: Places, catalog: Catalog) -> None:
        self._backend = backend
        self._places = places
        self._catalog = catalog
        self._written: dict[StreamKey, tuple[Any, ...]] = {}
        self._seqs: dict[StreamKey, int] = {}

    def write(
        self,
        key: StreamKey,
        stream: FollowedStream,
        *,
        again: bool = False,
        steps: bool = False,
    ) -> None:
        """Write a stream's record unless it is there; ``again`` even then, with ``steps`` if only its sequence is new."""
        owner = owner_of(stream.source.holder())
        if owner not in self._backend.session.tokens:
            return
        feeds = stream.feeds
        learned = {holder: tuple(self._catalog.learned(holder).items()) for holder in feeds}
        worth = (stream.state, tuple((holder, feed.mask, learned[holder]) for holder, feed in feeds.items()))
        known = not again and self._written.get(key) == worth
        if known and not (steps and self._seqs.get(key) != stream.seq):
            return
        told = tuple(
            FeedRecord(holder, tuple(self._places.names(feed.mask)), learned[holder]) for holder, feed in feeds.items()
        )
        self._put(*key, stream, told, loud=not known)
        self._written[key] = worth
        self._seqs[key] = stream.seq

    def write_unheard(self, source: Source) -> None:
        """Let the others know of a stream of which nothing was heard yet."""
        self._put(source.stream, None, FollowedStream(source), ())

    def remove_unheard(self, source: Source) -> None:
        """Something was heard of the stream, or it is over."""
        self._backend.say(owner_of(source.holder()), _field(source.stream, None), None)

    def remove(self, key: StreamKey, source: Source) -> None:
        self._backend.say(owner_of(source.holder()), _field(*key), None)
        self._written.pop(key, None)
        self._seqs.pop(key, None)

    def _put(
        self, name: str, topic: str | None, stream: FollowedStream, feeds: tuple[FeedRecord, ...], loud: bool = True
    ) -> None:
        record = StreamRecord(
            source=stream.source, state=stream.state, reason=stream.reason, seq=stream.seq, feeds=feeds
        )
        self._backend.say(owner_of(stream.source.holder()), _field(name, topic), _encoder.encode(record), loud=loud)


def _field(stream: str, topic: str | None) -> bytes:
    """The name of a record among those of its owner; without a topic for a stream of which nothing was heard."""
    return msgspec.json.encode([stream, topic])
