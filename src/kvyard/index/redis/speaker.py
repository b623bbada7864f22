"""The speaker: tells all readers what the streams that this replica writes are worth, when that changes and not otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvyard.index.catalog import Catalog
from kvyard.index.feed import Feed
from kvyard.index.places import Holder, Places
from kvyard.index.redis.directory import owner_of
from kvyard.index.redis.records import FeedRecord, StreamRecord, field, write
from kvyard.index.redis.rows import RedisIndex
from kvyard.index.stream import Source, Stream


class Speaker:
    """What was said of each (stream, topic)."""

    def __init__(self, backend: RedisIndex, places: Places, catalog: Catalog) -> None:
        self._backend = backend
        self._places = places
        self._catalog = catalog
        self._said: dict[tuple[str, str], tuple[Any, ...]] = {}
        self._seqs: dict[tuple[str, str], int] = {}

    def say(
        self,
        key: tuple[str, str],
        stream: Stream,
        feeds: Mapping[Holder, Feed],
        *,
        anew: bool = False,
        steps: bool = False,
    ) -> None:
        """Say what a stream is worth, unless the others know; ``anew`` even then, with ``steps`` of its sequence too."""
        owner = owner_of(stream.source.holder())
        if owner not in self._backend.session.tokens:
            return
        learned = {holder: tuple(self._catalog.learned(holder).items()) for holder in feeds}
        worth = (stream.state, tuple((holder, feed.mask, learned[holder]) for holder, feed in feeds.items()))
        known = not anew and self._said.get(key) == worth
        if known and not (steps and self._seqs.get(key) != stream.seq):
            return
        record = StreamRecord(
            source=stream.source,
            state=stream.state,
            reason=stream.reason,
            seq=stream.seq,
            feeds=tuple(
                FeedRecord(holder, tuple(self._places.names(feed.mask)), learned[holder])
                for holder, feed in feeds.items()
            ),
        )
        self._backend.say(owner, field(*key), write(record), loud=not known)
        self._said[key] = worth
        self._seqs[key] = stream.seq

    def say_unheard(self, source: Source) -> None:
        """Let the others know of a stream of which there is nothing to say yet."""
        nothing = Stream(source)
        record = StreamRecord(source=source, state=nothing.state, reason=nothing.reason, seq=-1, feeds=())
        self._backend.say(owner_of(source.holder()), field(source.stream, None), write(record))

    def heard(self, source: Source) -> None:
        """There is something to say of a stream now."""
        self._backend.say(owner_of(source.holder()), field(source.stream, None), None)

    def take_back(self, key: tuple[str, str], source: Source) -> None:
        """Say nothing of a stream any more."""
        self._backend.say(owner_of(source.holder()), field(*key), None)
        self._said.pop(key, None)
        self._seqs.pop(key, None)
