"""An indexer that shares its rows: several replicas, one server, and each worker's streams written by one of them.

A replica applies the streams it is given, also those that another replica writes: what it learns goes to its own mirror, and
to the server as well while the lease is its own. Every replica answers for all workers, from the server's rows and from what
their writers say of their streams. Where no writer vouches for rows, because a lease ran out, a writer has not caught up or
the server is away, they earn nothing, and the answer says why.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar, TypeVarTuple

import msgspec

from kvyard.blocks.spec import GroupSpec
from kvyard.clock import SECOND, from_seconds
from kvyard.decode_errors import DECODE_ERRORS
from kvyard.errors import KvyardError
from kvyard.events.transport import State, Update
from kvyard.hashing import PLAIN, Namespace
from kvyard.index.bits import mask_of
from kvyard.index.identity import Identity
from kvyard.index.indexer import Indexer
from kvyard.index.places import Holder, Place, Places
from kvyard.index.redis.directory import owner_of
from kvyard.index.redis.rows import RedisIndex
from kvyard.index.roster import Roster
from kvyard.index.scorer import Explanation, HolderTrust, Scores
from kvyard.index.stream import FollowedStream, Source

AnswerT = TypeVar("AnswerT")
Question = TypeVarTuple("Question")
StreamKey: TypeAlias = tuple[str, str]
"""A stream's name and topic."""
INDEXER_OPTIONS = ("dedup", "weights", "trust", "waiting", "remembered")
STEADY = 5
"""Attempts at an answer during which nothing changes that it depends on."""
KEEP = 600 * SECOND
"""Retention of rows without a writer, in case a replica gets the lease again."""


class FeedRecord(msgspec.Struct, frozen=True):
    """Share of one stream in one holder's rows."""

    holder: Holder
    places: tuple[Place, ...]
    groups: tuple[tuple[int | None, GroupSpec | None], ...]
    """Groups learned from events."""


class StreamRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One (stream, topic): whose it is, and how far its rows can be trusted."""

    source: Source
    state: State
    reason: str
    seq: int
    feeds: tuple[FeedRecord, ...]


_decoder = msgspec.msgpack.Decoder(StreamRecord)


@lru_cache(1 << 14)
def read(text: bytes) -> StreamRecord | None:
    """Return a record from the server; ``None`` for malformed text."""
    try:
        return _decoder.decode(text)
    except (*DECODE_ERRORS, KvyardError):
        return None


class SharedIndexer(Indexer):
    """An ``Indexer`` on a ``RedisIndex``. The caller calls ``tick`` when ``due`` has come, each second at least."""

    backend: RedisIndex

    def __init__(
        self,
        url: str = "redis://127.0.0.1:6379/0",
        identity: Identity | None = None,
        *,
        linger: float = 0.0,
        **options: Any,
    ) -> None:
        """``options`` are those of ``Indexer`` and ``RedisIndex``: namespace, replica, lease, timeout, backoff, budget, clock.

        Changes go to the server at the end of each update, or ``linger`` seconds later. Raises ``KvyardError`` where the server
        can't be used, or its namespace has an index with another identity.
        """
        identity = identity or Identity()
        places = Places()
        example = identity.keys([0] * identity.block_size)[0]
        named = f"blocks of {identity.block_size} tokens by {identity.algorithm.name}, the first zeros {example:016x}"
        own = {name: options.pop(name) for name in INDEXER_OPTIONS if name in options}
        backend = RedisIndex(url, places=places, identity=named, **options)
        backend.acquired = self._announce
        self._linger = from_seconds(linger)
        self._flushed = 0
        self._judged: tuple[int, bool] = (-1, False)
        self._received: dict[bytes, tuple[int, int]] = {}
        """Per record, the last sequence and when it was first seen."""
        self._orphaned: dict[str, int] = {}
        """Owners without a writer, and since when we know."""
        self._written: dict[StreamKey, tuple[object, int]] = {}
        """Per stream a digest of its record, and its last batch."""
        self._announced: dict[Holder, Source] = {}
        """Holders whose groups are configured elsewhere only."""
        super().__init__(identity, backend, places=places, **own)

    # -- who there is -----------------------------------------------------------------------------------------------

    def register(self, source: Source) -> None:
        """See ``Indexer``. The stream is written by this replica as soon as no other has the lease of its worker or pool."""
        super().register(source)
        self.backend.session.want(owner_of(source.holder()))
        if not any(stream == source.stream for stream, _ in self.streams):
            self._put(source.stream, None, FollowedStream(source))
        self.backend.flush()

    def unregister(self, stream: str) -> None:
        """See ``Indexer``. If this replica wrote it, its rows go; other replicas that have it registered may write it then."""
        source = self.sources.get(stream)
        if source is None:
            return
        owner = owner_of(source.holder())
        self._take_back(source, None)
        for key in self.streams:
            if key[0] == stream:
                self._take_back(source, key[1])
        super().unregister(stream)
        if not any(owner_of(known.holder()) == owner for known in self.sources.values()):
            self.backend.disown(owner)
        self.backend.flush()

    def writes(self, stream: str) -> bool:
        """Return true if this replica writes a registered stream, as far as it knows."""
        source = self.sources.get(stream)
        return source is not None and owner_of(source.holder()) in self.backend.session.tokens

    @property
    def trouble(self) -> str:
        """See ``Indexer``."""
        return self.backend.reason

    def close(self) -> None:
        """Send what waits, give the leases back and disconnect."""
        self.backend.close()

    # -- events in --------------------------------------------------------------------------------------------------

    def apply(self, update: Update, now: int = 0) -> None:
        """See ``Indexer``. Never raises because of the server."""
        key = (update.stream, update.topic)
        known, learned = key in self.streams, self.catalog.version
        super().apply(update, now)
        if key in self.streams:
            source = self.sources[update.stream]
            if not known:
                self._take_back(source, None)
            # What one stream teaches of a holder, the records of all its streams must say.
            self._publish([key] if learned == self.catalog.version else self._of(owner_of(source.holder())))
        if not self._linger or self.backend.clock.now() >= self._flushed + self._linger:
            self._flush()

    def lose(self, stream: str, reason: str) -> None:
        """See ``Indexer``."""
        super().lose(stream, reason)
        self._publish([key for key in self.streams if key[0] == stream])
        self._flush()

    def tick(self, now: int = 0) -> None:
        """Do what is due: leases, what lingers, what others say. Raises nothing. ``now`` is the caller's, as in ``apply``."""
        self._publish(self.streams, steps=True)
        self.backend.tick()
        self._flushed = self.backend.clock.now()
        for owner in self.backend.directory.owners.values():
            for name, text in owner.says.items():
                record = read(text)
                if record is not None and self._received.get(name, (-2, 0))[0] != record.seq:
                    self._received[name] = (record.seq, now)
                    self._dirty = True
        self._reap()

    @property
    def due(self) -> int:
        """Return the time at which ``tick`` has something to do, on ``backend.clock``."""
        if self.backend.server.connected and self.backend.pending:
            return self._flushed + self._linger
        return self.backend.due

    # -- answers out ------------------------------------------------------------------------------------------------

    def refresh(self, force: bool = False) -> None:
        """See ``Indexer``. Asks the server, if that is due."""
        self.backend.look()
        if self._view() != self._judged:
            self._dirty = True
        super().refresh(force)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        self.backend.flush()
        self._flushed = self.backend.clock.now()

    def _announce(self, owner: str) -> None:
        """Write the states of the streams of ``owner`` once our rows of it are sent."""
        heard = {stream for stream, _ in self.streams}
        for source in self.sources.values():
            if owner_of(source.holder()) == owner and source.stream not in heard:
                self._put(source.stream, None, FollowedStream(source))
        self._publish(self._of(owner), again=True)

    def _of(self, owner: str) -> list[StreamKey]:
        """Return the streams of an owner."""
        return [key for key, stream in self.streams.items() if owner_of(stream.source.holder()) == owner]

    def _publish(self, keys: Iterable[StreamKey], *, again: bool = False, steps: bool = False) -> None:
        """Write records of streams whose leases we have, unless they are there: what changes the worth of rows.

        ``again`` even if they are, with ``steps`` also where only the sequence is new.
        """
        for key in keys:
            stream = self.streams[key]
            if owner_of(stream.source.holder()) not in self.backend.session.tokens:
                continue
            feeds = stream.feeds.items()
            learned = {holder: tuple(self.catalog.learned(holder).items()) for holder, _ in feeds}
            worth = (stream.state, tuple((holder, feed.mask, learned[holder]) for holder, feed in feeds))
            before, seq = self._written.get(key, (None, -1))
            known = not again and before == worth
            if known and (not steps or seq == stream.seq):
                continue
            records = [
                FeedRecord(holder, tuple(self.places.names(feed.mask)), learned[holder]) for holder, feed in feeds
            ]
            self._put(*key, stream, records, loud=not known)
            self._written[key] = (worth, stream.seq)

    def _put(
        self, name: str, topic: str | None, stream: FollowedStream, feeds: Sequence[FeedRecord] = (), loud: bool = True
    ) -> None:
        """Write a record; without a topic for a stream from which nothing was received."""
        source = stream.source
        record = StreamRecord(
            source=source, state=stream.state, reason=stream.reason, seq=stream.seq, feeds=tuple(feeds)
        )
        field = msgspec.json.encode([name, topic])
        self.backend.publish(owner_of(source.holder()), field, msgspec.msgpack.encode(record), loud=loud)

    def _take_back(self, source: Source, topic: str | None) -> None:
        self.backend.publish(owner_of(source.holder()), msgspec.json.encode([source.stream, topic]), None)
        if topic is not None:
            self._written.pop((source.stream, topic), None)

    def score_keys(
        self, keys: Sequence[int], tokens: int | None = None, workers: Iterable[Holder] | None = None, now: int = 0
    ) -> Scores:
        """See ``Indexer``."""
        wanted = None if workers is None else list(workers)  # it may be asked several times
        return self._answer(super().score_keys, keys, tokens, wanted, now)

    def matches(self, keys: Sequence[int]) -> dict[Holder, int]:
        """See ``Indexer``."""
        return self._answer(super().matches, keys)

    def reaches(self, roster: Roster, keys: Sequence[int], tokens: int | None = None) -> list[list[tuple[int, int]]]:
        """See ``Indexer``."""
        return self._answer(super().reaches, roster, keys, tokens)

    def explain(self, tokens: Sequence[int], worker: Holder, namespace: Namespace = PLAIN, now: int = 0) -> Explanation:
        """See ``Indexer``."""
        return self._answer(super().explain, tokens, worker, namespace, now)

    def _answer(self, ask: Callable[[*Question], AnswerT], *question: *Question) -> AnswerT:
        """Return the result of ``ask`` for a state that didn't change meanwhile."""
        self.backend.look()
        for _ in range(STEADY):
            view = self._view()
            if view != self._judged:
                self._dirty = True
            answer = ask(*question)
            if self._view() == view == self._judged:
                return answer
        self.scorer.trust(self.scorer.standings, -1)
        self._dirty = False
        answer = ask(*question)
        self._dirty = True
        return answer

    def _view(self) -> tuple[int, bool]:
        """Return a number that changes with everything that answers depend on besides the rows."""
        return self.backend.directory.looks, self.backend.server.connected

    def _update_trust(self) -> None:
        """Compute the trust in each holder from the writers' records."""
        self._dirty = False
        speaking: dict[Holder, list[FollowedStream]] = {}
        mentioned = untrusted = 0
        connected = self.backend.server.connected
        known = self._published_by_all() if connected else {}
        for name in [*self.sources, *sorted(known.keys() - self.sources.keys())]:
            recorded = known.get(name, [])
            for record, stream in recorded:
                for feed in record.feeds:
                    mask = mask_of(self.places.number(place) for place in feed.places)
                    mentioned |= mask
                    if not self._trust.of(stream.state):
                        untrusted |= mask
                    self._adopt(record.source, feed)
                    speaking.setdefault(feed.holder, []).append(stream)
            if not any(record.feeds for record, _ in recorded):
                source = self.sources.get(name) or recorded[0][0].source
                self._adopt(source, FeedRecord(source.holder(), (), ()))
                speaking.setdefault(source.holder(), []).extend(
                    [stream for _, stream in recorded] or [FollowedStream(source)]
                )
        standings = {holder: self._standing(streams) for holder, streams in speaking.items()}
        if connected:
            self._retire(standings)
            for place in self.backend.directory.places:
                number = self.places.number(place)
                if not mentioned >> number & 1:
                    untrusted |= 1 << number
        else:
            away = HolderTrust(state=State.STALE, confidence=0.0, reason=self.backend.reason)
            standings = dict.fromkeys([*standings, *self._fed()], away)
        self.scorer.trust(standings, untrusted if connected else -1)
        self._judged = self._view()

    def _published_by_all(self) -> dict[str, list[tuple[StreamRecord, FollowedStream]]]:
        """Return every stream that has a writer's record, with its current trust."""
        by_stream: dict[str, list[tuple[StreamRecord, FollowedStream]]] = {}
        now = self.backend.clock.now()
        tokens = self.backend.session.tokens
        for name, owner in self.backend.directory.owners.items():
            for key, text in sorted(owner.says.items()):
                record = read(text)
                if record is None or owner_of(record.source.holder()) != name:
                    continue
                stream = FollowedStream(record.source)
                stream.state, stream.reason = record.state, record.reason
                stream.updated = self._received.get(key, (0, 0))[1]
                if name not in tokens and not owner.alive(now):
                    stream.state, stream.reason = State.STALE, f"the replica that wrote {name} is gone"
                by_stream.setdefault(record.source.stream, []).append((record, stream))
        return by_stream

    def _adopt(self, source: Source, feed: FeedRecord) -> None:
        """Learn of a holder's groups what its writer knows, unless we know it ourselves."""
        if feed.holder in self._fed() or source.stream in self.sources:
            if source.stream in self.sources and source.groups is None:
                self.catalog.adopt(feed.holder, {**dict(feed.groups), **self.catalog.learned(feed.holder)})
            return
        if source.groups is not None and self._announced.get(feed.holder) != source:
            self.catalog.configure(feed.holder, source.groups, source.alignment)
            self._announced[feed.holder] = source
        elif source.groups is None and feed.groups:
            self.catalog.adopt(feed.holder, dict(feed.groups))

    def _fed(self) -> list[Holder]:
        """Return the holders that streams of this replica feed."""
        return [holder for stream in self.streams.values() for holder in stream.feeds]

    def _retire(self, mentioned: Iterable[Holder]) -> None:
        """Remove holders that neither this process nor any writer nor ``mentioned`` knows."""
        known = set(mentioned)
        known.update(place.holder for place in self.backend.directory.places)
        known.update(self._fed())
        registered = {source.holder() for source in self.sources.values()}
        for holder in [holder for holder in self.places.of if holder not in known]:
            self.places.retire(holder)
            if holder not in registered:
                self._announced.pop(holder, None)
                self.catalog.forget(holder)

    def _reap(self) -> None:
        """Remove what is left of owners that have had no writer for a long time."""
        if not self.backend.server.connected:
            return
        now = self.backend.clock.now()
        lost = {name for name, owner in self.backend.directory.owners.items() if not owner.alive(now)}
        lost -= self.backend.session.tokens.keys()
        self._orphaned = {name: self._orphaned.get(name, now) for name in lost}
        for name, since in self._orphaned.items():
            if now - since > KEEP:
                self.backend.reap(name)
