"""The indexer: streams in, answers out. It joins the parts of this package and is all that a service or a router needs.

A subscriber or a simulation calls ``apply``, a router calls ``score``. One thread does both,
or the caller takes turns. It knows no sockets, HTTP or clocks: the time comes with each call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kvyard.errors import KvyardError
from kvyard.events.transport import State, Update
from kvyard.events.types import EventBatch, Tier
from kvyard.hashing import PLAIN, Namespace
from kvyard.index.backend import Backend
from kvyard.index.catalog import Catalog
from kvyard.index.dedup import DedupFilter
from kvyard.index.explain import Explanation, explain
from kvyard.index.feed import Feed
from kvyard.index.identity import Identity
from kvyard.index.memory import MemoryIndex
from kvyard.index.places import Holder, Places
from kvyard.index.roster import Roster
from kvyard.index.scorer import Scorer, Scores, Standing, Trust
from kvyard.index.sequencer import BatchSequencer
from kvyard.index.stream import SEVERITY, FollowedStream, Source


class Indexer:
    """One index over any number of streams of one model."""

    def __init__(
        self,
        identity: Identity | None = None,
        backend: Backend | None = None,
        *,
        dedup: DedupFilter | None = None,
        weights: Mapping[Tier, float] | None = None,
        trust: Trust | None = None,
        waiting: int = 1 << 16,
        remembered: int = 1 << 16,
        places: Places | None = None,
    ) -> None:
        """``waiting`` and ``remembered`` bound each feed, in blocks; see ``Feed``. ``places`` where the backend names them."""
        self.identity = identity or Identity()
        self.backend: Backend = MemoryIndex() if backend is None else backend
        self.dedup = dedup or DedupFilter()
        self.places = Places() if places is None else places
        self.catalog = Catalog()
        self.scorer = Scorer(self.places, self.catalog, self.backend, self.identity.block_size, weights)
        self.unknown_streams = 0
        """Updates of streams that aren't registered: never applied, so that a late one can't revive what was removed."""
        self._trust = trust or Trust()
        self._bounds = {"waiting": waiting, "remembered": remembered}
        self._sources: dict[str, Source] = {}
        self._sequencer = BatchSequencer()
        self._streams: dict[tuple[str, str], FollowedStream] = {}
        self._feeds: dict[tuple[str, str], dict[Holder, Feed]] = {}
        self._dirty = False
        """Whether trust must be updated before the next answer."""

    # -- who there is -----------------------------------------------------------------------------------------------

    def register(self, source: Source) -> None:
        """Listen to a stream from now on. Raises ``KvyardError`` where it is registered already, differently."""
        known = self._sources.get(source.stream)
        if known is not None:
            if known != source:
                raise KvyardError(f"stream {source.stream!r} is registered already: unregister it first")
            return
        if source.groups is not None:
            self.catalog.configure(source.holder(), source.groups, source.alignment)
        self._sources[source.stream] = source
        self._dirty = True

    def unregister(self, stream: str) -> None:
        """Forget a stream and all it announced: rows, counts, what waits, and its group specs. An unknown one is no error."""
        source = self._sources.pop(stream, None)
        if source is None:
            return
        self._sequencer.forget(stream)
        for key in [key for key in self._streams if key[0] == stream]:
            del self._streams[key]
            for holder, feed in self._feeds.pop(key, {}).items():
                feed.clear()
                if not any(holder in feeds for feeds in self._feeds.values()):
                    self.catalog.forget(holder)
                    self.places.retire(holder)
        self._dirty = True

    def share(self, pool: str, members: Iterable[Holder]) -> None:
        """Credit what ``pool`` holds to each of ``members``."""
        self.places.share(pool, members)

    @property
    def sources(self) -> Sequence[Source]:
        """Every registered stream."""
        return list(self._sources.values())

    @property
    def streams(self) -> Mapping[tuple[str, str], FollowedStream]:
        """Every (stream, topic) heard so far."""
        return self._streams

    # -- events in --------------------------------------------------------------------------------------------------

    def apply(self, update: Update, now: int = 0) -> None:
        """Take in the next update of a registered stream, received at ``now``."""
        key = (update.stream, update.topic)
        stream = self._streams.get(key)
        if stream is None:
            source = self._sources.get(update.stream)
            if source is None:
                self.unknown_streams += 1
                return
            stream = self._streams[key] = FollowedStream(source)
            self._feeds[key] = {}
        state = stream.state
        stream.follow(update, now)
        if update.replaces:
            for feed in self._feeds[key].values():
                feed.clear()
        if update.events:
            feed = stream.feeds.get(update.rank) or self._feed(key, stream, update.rank)
            before = feed.mask
            feed.apply(update.events, stream.source.clear_scope == "all")
            if feed.mask != before:
                self._dirty = True
        if stream.state != state:
            self._dirty = True

    def apply_batch(self, batch: EventBatch, now: int = 0) -> None:
        """Take in a batch without a transport in between: one that came before changes nothing, a gap makes it stale."""
        update = self._sequencer.update(batch)
        if update is not None:
            self.apply(update, now)

    def lose(self, stream: str, reason: str) -> None:
        """Mark all of a stream stale until an update replaces it: for a loss that no update tells of."""
        for key, known in self._streams.items():
            if key[0] == stream:
                known.lose(reason)
        self._dirty = True

    def tick(self, now: int = 0) -> None:
        """Do what is due from time to time. Only an index that is shared over a server has anything to do."""

    def close(self) -> None:
        """Let go of what is held outside this process, such as leases."""

    # -- answers out ------------------------------------------------------------------------------------------------

    def keys(self, tokens: Sequence[int], namespace: Namespace = PLAIN) -> list[int]:
        """A prompt's request keys."""
        return self.identity.keys(tokens, namespace)

    def score(
        self,
        tokens: Sequence[int],
        namespace: Namespace = PLAIN,
        workers: Iterable[Holder] | None = None,
        now: int = 0,
    ) -> Scores:
        """How long a prefix of a prompt each worker could use. Raises ``IdentityError`` for what can't be named."""
        return self.score_keys(self.identity.keys(tokens, namespace), len(tokens), workers, now)

    def score_keys(
        self, keys: Sequence[int], tokens: int | None = None, workers: Iterable[Holder] | None = None, now: int = 0
    ) -> Scores:
        """The same for request keys; see ``Scorer.score``."""
        self._look_at_ages()
        return self.scorer.score(keys, tokens, workers, now)

    def matches(self, keys: Sequence[int]) -> dict[Holder, int]:
        """Only how many blocks each worker could use; see ``Scorer.matches``."""
        if self._dirty:
            self._update_trust()
        return self.scorer.matches(keys)

    def roster(self, workers: Sequence[Holder]) -> Roster:
        """Workers in an order of the caller's, to ask ``reaches`` about."""
        return Roster(self.scorer, workers)

    def reaches(self, roster: Roster, keys: Sequence[int], tokens: int | None = None) -> list[list[int]]:
        """Per tier and worker of ``roster`` how many blocks of a prompt it could use; see ``Roster.reaches``."""
        if self._dirty:
            self._update_trust()
        return roster.reaches(keys, tokens)

    def explain(self, tokens: Sequence[int], worker: Holder, namespace: Namespace = PLAIN, now: int = 0) -> Explanation:
        """Why a worker matches as much of a prompt as it does."""
        self._look_at_ages()
        keys = self.identity.keys(tokens, namespace)
        return explain(self.scorer, self.places, keys, len(tokens), worker, now)

    def check_integrity(self) -> None:
        """Raise ``AssertionError``, saying what is wrong, unless all parts agree with themselves."""
        self.backend.check_integrity()
        self.dedup.check_integrity()
        for feeds in self._feeds.values():
            for feed in feeds.values():
                feed.check_integrity()

    # -- inside -----------------------------------------------------------------------------------------------------

    def feeds(self) -> Iterable[tuple[str, Feed]]:
        """Every feed with the name of its stream."""
        return [(key[0], feed) for key, feeds in self._feeds.items() for feed in feeds.values()]

    def feeds_of(self, stream: str, topic: str) -> list[Feed]:
        """The feeds of one (stream, topic)."""
        return list(self._feeds.get((stream, topic), {}).values())

    def adopt(self, stream: str, topic: str) -> FollowedStream:
        """The (stream, topic) of a registered stream, begun now: for what another index heard of it."""
        key = (stream, topic)
        known = self._streams[key] = FollowedStream(self._sources[stream])
        self._feeds[key] = {}
        self._dirty = True
        return known

    def feed_for(self, stream: str, topic: str, holder: Holder, ranks: Iterable[int | None]) -> Feed:
        """The feed of one holder, which updates of ``ranks`` go to from now on."""
        key = (stream, topic)
        feed = self._feeds[key].get(holder) or self._open(key, holder)
        self._streams[key].feeds.update(dict.fromkeys(ranks, feed))
        return feed

    def refresh(self, force: bool = False) -> None:
        """Bring up to date who there is and how far each can be trusted; ``force`` even where nothing seems to have changed."""
        if force or self._dirty:
            self._update_trust()

    def _feed(self, key: tuple[str, str], stream: FollowedStream, rank: int | None) -> Feed:
        holder = stream.source.holder(rank)
        feed = stream.feeds[rank] = self._feeds[key].get(holder) or self._open(key, holder)
        return feed

    def _open(self, key: tuple[str, str], holder: Holder) -> Feed:
        feed = Feed(holder, self.places, self.backend, self.dedup, self.catalog, self.identity, **self._bounds)
        source = self._sources[key[0]]
        if source.groups is not None and source.by_rank:
            self.catalog.configure(holder, source.groups, source.alignment)
        self._feeds[key][holder] = feed
        self._dirty = True
        return feed

    def _update_trust(self) -> None:
        """Find out how far each holder can be trusted."""
        self._dirty = False
        untrusted = 0
        standings: dict[Holder, Standing] = {}
        by_name: dict[str, list[tuple[tuple[str, str], FollowedStream]]] = {}
        for key, stream in self._streams.items():
            by_name.setdefault(key[0], []).append((key, stream))
        for name, source in self._sources.items():
            known = by_name.get(name, [])
            holders: dict[Holder, list[FollowedStream]] = {}
            for key, stream in known:
                for holder, feed in self._feeds[key].items():
                    holders.setdefault(holder, []).append(stream)
                    if not self._trust.of(stream.state):
                        untrusted |= feed.mask
            if not holders:
                holders[source.holder()] = [stream for _, stream in known]
            for holder, streams in holders.items():
                standings[holder] = self._joined(standings.get(holder), streams)
        self.scorer.trust(standings, untrusted)

    def _joined(self, before: Standing | None, streams: Sequence[FollowedStream]) -> Standing:
        """The standing of a holder that ``streams`` speak for as well."""
        worst = before
        for stream in streams or (None,):
            state = State.STALE if stream is None else stream.state
            reason = "nothing heard yet" if stream is None else stream.reason
            confidence = self._trust.of(state)
            if worst is None:
                worst = Standing(
                    state=state, confidence=confidence, heard=stream.updated if stream else 0, reason=reason
                )
                continue
            grave = max(worst.state, state, key=SEVERITY.__getitem__)
            # What a stale stream fed isn't counted, so it doesn't lessen the word of the others.
            confident = [value for value in (worst.confidence, confidence) if value]
            worst = Standing(
                state=grave,
                confidence=min(confident, default=0.0),
                heard=min(worst.heard, stream.updated if stream else 0),
                reason="; ".join(filter(None, (worst.reason, reason))),
            )
        assert worst is not None
        return worst

    def _look_at_ages(self) -> None:
        """Ages change with every update, trust seldom: only bring the former up to date."""
        if self._dirty:
            self._update_trust()
        standings = self.scorer.standings
        heard: dict[Holder, int] = {}
        for key, feeds in self._feeds.items():
            updated = self._streams[key].updated
            for holder in feeds:
                heard[holder] = min(updated, heard.get(holder, updated))
        for holder, at in heard.items():
            standing = standings.get(holder)
            if standing is not None and standing.heard != at:
                standings[holder] = msgspec.structs.replace(standing, heard=at)
