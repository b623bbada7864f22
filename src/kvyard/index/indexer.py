"""The indexer: it applies updates of streams and scores prompts. A service or a router needs only this part of the package.

A subscriber or a simulation calls ``apply``, a router calls ``score``; calls must not run at the same time. It has no socket
and no clock: the caller passes the time.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from kvyard.errors import KvyardError
from kvyard.events.transport import Update
from kvyard.events.types import EventBatch, Tier
from kvyard.hashing import PLAIN, Namespace
from kvyard.index.backend import IndexBackend
from kvyard.index.catalog import Catalog
from kvyard.index.dedup import DedupFilter
from kvyard.index.feed import Feed
from kvyard.index.identity import Identity
from kvyard.index.memory import MemoryIndex
from kvyard.index.places import Holder, Places
from kvyard.index.roster import Roster
from kvyard.index.scorer import Explanation, HolderTrust, Scorer, Scores, Trust
from kvyard.index.stream import SEVERITY, BatchSequencer, FollowedStream, Source


class Indexer:
    """One index over any number of streams of one model."""

    def __init__(
        self,
        identity: Identity | None = None,
        backend: IndexBackend | None = None,
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
        self.backend: IndexBackend = MemoryIndex() if backend is None else backend
        self.dedup = dedup or DedupFilter()
        self.places = Places() if places is None else places
        self.catalog = Catalog()
        self.scorer = Scorer(self.places, self.catalog, self.backend, self.identity.block_size, weights)
        self.unknown_streams = 0
        """Updates of streams that aren't registered: never applied, so that a late one can't revive what was removed."""
        self._trust = trust or Trust()
        self._bounds = {"waiting": waiting, "remembered": remembered}
        self.sources: dict[str, Source] = {}
        """Every registered stream."""
        self.streams: dict[tuple[str, str], FollowedStream] = {}
        """Every (stream, topic) seen so far."""
        self.topics: dict[str, list[FollowedStream]] = {}
        """Topics of each stream seen so far."""
        self._windowed: dict[Holder, list[Feed]] = {}
        """Feeds of workers whose sliding windows were configured."""
        self._sequencer = BatchSequencer()
        self._dirty = False
        """True if trust must be updated before the next answer."""

    # -- who there is -----------------------------------------------------------------------------------------------

    def register(self, source: Source) -> None:
        """Listen to a stream from now on. Raises ``KvyardError`` if it is registered already, differently."""
        known = self.sources.get(source.stream)
        if known is not None:
            if known != source:
                raise KvyardError(f"stream {source.stream!r} is registered already: unregister it first")
            return
        if source.groups is not None:
            self.catalog.configure(source.holder(), source.groups, source.alignment)
        self.sources[source.stream] = source
        self._dirty = True

    def unregister(self, stream: str) -> None:
        """Remove a stream and all it announced: rows, counts, waiting stores, and its group specs. An unknown stream is no
        error."""
        source = self.sources.pop(stream, None)
        if source is None:
            return
        self._sequencer.forget(stream)
        self.topics.pop(stream, None)
        for key in [key for key in self.streams if key[0] == stream]:
            for holder, feed in self.streams.pop(key).feeds.items():
                feed.clear()
                self._windowed.pop(holder, None)
                if not any(holder in other.feeds for other in self.streams.values()):
                    self.catalog.forget(holder)
                    self.places.retire(holder)
        self._dirty = True

    def restart(self, stream: str) -> None:
        """Discard all that a registered stream announced, and wait for its announcements: for a reader that begins again."""
        source = self.sources[stream]
        self.unregister(stream)
        self.register(source)

    def distrust(self, worker: str, reason: str) -> None:
        """Credit no block that the streams of ``worker`` announced, until an update replaces or clears all of them."""
        for stream in self.streams.values():
            if stream.source.worker == worker:
                stream.lose(reason)
                stream.distrusted = True
                self._dirty = True

    def share(self, pool: str, members: Iterable[Holder]) -> None:
        """Credit the blocks of ``pool`` to each of ``members``."""
        self.places.share(pool, members)

    # -- events in --------------------------------------------------------------------------------------------------

    def apply(self, update: Update, now: int = 0) -> None:
        """Take in the next update of a registered stream, received at ``now``."""
        key = (update.stream, update.topic)
        stream = self.streams.get(key)
        if stream is None:
            source = self.sources.get(update.stream)
            if source is None:
                self.unknown_streams += 1
                return
            stream = self._begin(update.stream, update.topic, source)
        state = stream.state
        stream.follow(update, now)
        if update.replaces:
            for feed in stream.feeds.values():
                feed.clear()
        if update.events or update.problems:
            feed = stream.by_rank.get(update.rank) or self.feed_for(
                stream, stream.source.holder(update.rank), [update.rank]
            )
            if update.problems:
                feed.report(update.problems)
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
        """Mark all of a stream stale until an update replaces it: for a loss that no update reports."""
        for key, known in self.streams.items():
            if key[0] == stream:
                known.lose(reason)
        self._dirty = True

    def tick(self, now: int = 0) -> None:
        """Do periodic work. Only an index on a server has any."""

    @property
    def trouble(self) -> str:
        """Why rows can't be read or written now; empty if they can. Only a server can be away."""
        return ""

    def close(self) -> None:
        """Release resources outside this process, such as leases."""

    # -- answers out ------------------------------------------------------------------------------------------------

    def score(
        self, tokens: Sequence[int], namespace: Namespace = PLAIN, workers: Iterable[Holder] | None = None, now: int = 0
    ) -> Scores:
        """Return the length of the prefix that each worker could reuse. Raises ``IdentityError`` for a prompt that can't be
        named."""
        return self.score_keys(self.identity.keys(tokens, namespace), len(tokens), workers, now)

    def score_keys(
        self, keys: Sequence[int], tokens: int | None = None, workers: Iterable[Holder] | None = None, now: int = 0
    ) -> Scores:
        """Like ``score`` for request keys; see ``Scorer.score``."""
        if self._dirty:
            self._update_trust()
        self._update_ages()
        return self.scorer.score(keys, tokens, workers, now)

    def matches(self, keys: Sequence[int]) -> dict[Holder, int]:
        """Only how many blocks each worker could use; see ``Scorer.matches``."""
        if self._dirty:
            self._update_trust()
        return self.scorer.matches(keys)

    def roster(self, workers: Sequence[Holder]) -> Roster:
        """Return workers in an order of the caller's, to ask ``reaches`` about."""
        return Roster(self.scorer, workers)

    def reaches(self, roster: Roster, keys: Sequence[int], tokens: int | None = None) -> list[list[tuple[int, int]]]:
        """Return per tier how many blocks of a prompt the workers of ``roster`` could use; see ``Roster.reaches``."""
        if self._dirty:
            self._update_trust()
        return roster.reaches(keys, tokens)

    def computed(self, worker: Holder, tokens: int, last: Callable[[int], Sequence[int]]) -> None:
        """``worker`` has computed a prompt of ``tokens`` tokens, of which ``last`` returns the keys of the last whole blocks,
        given their number. This is for workers whose events don't tell all that changes then.
        """
        if self._windowed:
            for feed in self._windowed.get(worker, ()):
                feed.computed(tokens, last)

    def explain(self, tokens: Sequence[int], worker: Holder, namespace: Namespace = PLAIN, now: int = 0) -> Explanation:
        """Return why a worker matches as much of a prompt as it does."""
        return self.explain_keys(self.identity.keys(tokens, namespace), len(tokens), worker, now)

    def explain_keys(self, keys: Sequence[int], tokens: int, worker: Holder, now: int = 0) -> Explanation:
        """Return ``explain`` for request keys of a prompt of this many tokens."""
        if self._dirty:
            self._update_trust()
        self._update_ages()
        return self.scorer.explain(keys, tokens, worker, now)

    def check_integrity(self) -> None:
        """Raise ``AssertionError``, saying what is wrong, unless all parts agree with themselves."""
        self.backend.check_integrity()
        self.dedup.check_integrity()
        for _, feed in self.feeds():
            feed.parts.check_integrity()
        for name, known in self.topics.items():
            assert known == [followed for key, followed in self.streams.items() if key[0] == name], (
                f"topics of {name} are others"
            )
        assert len(self.streams) == sum(map(len, self.topics.values())), "a stream without its topics"

    # -- inside -----------------------------------------------------------------------------------------------------

    def feeds(self) -> Iterable[tuple[str, Feed]]:
        """Return every feed with the name of its stream."""
        return [(name, feed) for (name, _), stream in self.streams.items() for feed in stream.feeds.values()]

    def adopt(self, stream: str, topic: str) -> FollowedStream:
        """Begin to follow the (stream, topic) of a registered stream, for state that another index received."""
        known = self._begin(stream, topic, self.sources[stream])
        self._dirty = True
        return known

    def _begin(self, stream: str, topic: str, source: Source) -> FollowedStream:
        old = self.streams.get((stream, topic))
        followed = self.streams[stream, topic] = FollowedStream(source)
        known = self.topics.setdefault(stream, [])
        if old is None:
            known.append(followed)
        else:
            known[known.index(old)] = followed
        return followed

    def feed_for(self, stream: FollowedStream, holder: Holder, ranks: Iterable[int | None]) -> Feed:
        """Return the feed of one holder, which updates of ``ranks`` go to from now on."""
        feed = stream.feeds.get(holder)
        if feed is None:
            feed = Feed(holder, self.places, self.backend, self.dedup, self.catalog, self.identity, **self._bounds)
            source = stream.source
            if source.groups is not None and source.by_rank:
                self.catalog.configure(holder, source.groups, source.alignment)
            stream.feeds[holder] = feed
            if source.groups is not None and any(group.attention.is_window for group in source.groups):
                self._windowed.setdefault(holder, []).append(feed)
            self._dirty = True
        stream.by_rank.update(dict.fromkeys(ranks, feed))
        return feed

    def refresh(self, force: bool = False) -> None:
        """Update holders and the trust in each; ``force`` also if nothing seems to have changed."""
        if force or self._dirty:
            self._update_trust()

    def _update_trust(self) -> None:
        """Compute the trust in each holder."""
        self._dirty = False
        untrusted = 0
        speaking: dict[Holder, list[FollowedStream]] = {}
        heard: dict[str, list[FollowedStream]] = {}
        for (name, _), stream in self.streams.items():
            heard.setdefault(name, []).append(stream)
        for name, source in self.sources.items():
            streams = heard.get(name) or [FollowedStream(source)]
            if not any(stream.feeds for stream in streams):
                speaking.setdefault(source.holder(), []).extend(streams)
            for stream in streams:
                for holder, feed in stream.feeds.items():
                    speaking.setdefault(holder, []).append(stream)
                    if not self._trust.of(stream.state):
                        untrusted |= feed.mask
        self.scorer.trust({holder: self._standing(streams) for holder, streams in speaking.items()}, untrusted)

    def _standing(self, streams: Sequence[FollowedStream]) -> HolderTrust:
        """Return the trust in a holder that ``streams`` report for."""
        # What a stale stream fed isn't counted, so it doesn't lessen the word of the others.
        confident = [value for stream in streams if (value := self._trust.of(stream.state))]
        return HolderTrust(
            state=max((stream.state for stream in streams), key=SEVERITY.__getitem__),
            confidence=min(confident, default=0.0),
            heard=min(stream.updated for stream in streams),
            reason="; ".join(stream.reason for stream in streams if stream.reason),
        )

    def _update_ages(self) -> None:
        """Update ages alone: they change with every update, trust seldom does."""
        standings = self.scorer.standings
        heard: dict[Holder, int] = {}
        for stream in self.streams.values():
            for holder in stream.feeds:
                heard[holder] = min(stream.updated, heard.get(holder, stream.updated))
        for holder, instant in heard.items():
            standing = standings.get(holder)
            if standing is not None and standing.heard != instant:
                standings[holder] = msgspec.structs.replace(standing, heard=instant)
