"""A subscription: everything that arrives at one subscriber, sorted into streams by topic. No sockets here either.

Usually a publisher has one topic. Where publishers come to the subscriber, each has its own, and each is followed by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

import msgspec

from kvyard.events.transport.follower import Follower
from kvyard.events.transport.frames import read_live, read_reply
from kvyard.events.transport.inquiry import ReplayRequest
from kvyard.events.transport.state import Limits, State, StreamStatus, Update
from kvyard.events.wire import Decoder

MAX_TOPICS = 4096


class SubscriptionCounters(msgspec.Struct):
    """What couldn't be assigned to a stream."""

    malformed: int = 0
    """Messages that are no batches."""
    malformed_replies: int = 0
    too_many_topics: int = 0
    connections: int = 0
    disconnections: int = 0
    last_malformed: str = ""


class Subscription:
    """The streams of one subscriber."""

    def __init__(
        self,
        stream: str,
        *,
        source: bool,
        prefix: str = "",
        limits: Limits | None = None,
        decoder: Callable[[], Decoder] = Decoder,
    ) -> None:
        """Topics that don't begin with ``prefix`` are none of ours. ``decoder`` makes one for each stream."""
        self.stream = stream
        self.updates: deque[Update] = deque()
        self.counters = SubscriptionCounters()
        self._source = source
        self._prefix = prefix.encode()
        self._limits = limits or Limits()
        self._decoder = decoder
        self._numbers = count(1)
        self._followers: dict[bytes | None, Follower] = {}

    def start(self, now: int) -> None:
        """Begin to ask, before anything is heard, if there is a replay socket."""
        if self._source:
            self._follow(None, now)

    def positions(self) -> dict[bytes, tuple[int, int, int | None]]:
        """Per topic of a stream that is whole: the last batch applied, the digest of all, and the publisher's epoch."""
        return {
            follower.topic: (follower.at.applied, follower.at.digest, follower.status().publisher_epoch)
            for follower in self._followers.values()
            if follower.topic is not None and follower.state == State.FRESH
        }

    def resume(self, topic: bytes, position: tuple[int, int, int | None], now: int) -> None:
        """Go on with ``topic`` from another subscription's position; see ``Follower.resume``."""
        follower = self._followers.get(topic)
        if follower is None:
            follower = self._find(topic, now)
        if follower is not None:
            follower.resume(topic, *position, now)

    def message(self, parts: Sequence[bytes], now: int) -> None:
        """A message arrived on the stream's socket."""
        frame = read_live(parts)
        if isinstance(frame, str):
            self.counters.malformed += 1
            self.counters.last_malformed = frame
            return
        follower = self._followers.get(frame.topic) or self._find(frame.topic, now)
        if follower is not None:
            follower.live(frame, now)

    def reply(self, number: int, parts: Sequence[bytes], now: int) -> None:
        """A message arrived in answer to request ``number``."""
        reply = read_reply(parts)
        if isinstance(reply, str):
            self.counters.malformed_replies += 1
            self.counters.last_malformed = reply
            return
        for follower in self._followers.values():
            if follower.request is not None and follower.request.number == number:
                follower.reply(number, reply, now)
                return

    def connected(self, now: int) -> None:
        """A connection to a publisher was made, for the first time or again."""
        self.counters.connections += 1
        for follower in self._followers.values():
            if self.counters.disconnections:
                follower.reconnected(now)
            elif follower.state == State.STALE:
                follower.look(now)

    def disconnected(self) -> None:
        """A connection broke."""
        self.counters.disconnections += 1

    def tick(self, now: int) -> None:
        """It is ``now``: does what has become due."""
        for follower in self._followers.values():
            follower.tick(now)

    @property
    def due(self) -> int | None:
        """When ``tick`` should be called."""
        dues = (follower.due for follower in self._followers.values())
        return min((due for due in dues if due is not None), default=None)

    @property
    def requests(self) -> dict[int, ReplayRequest]:
        """The requests that should be under way, by number."""
        requests = (follower.request for follower in self._followers.values())
        return {request.number: request for request in requests if request is not None}

    @property
    def state(self) -> State:
        """The worst state of any stream; stale where there is none."""
        states = {follower.state for follower in self._followers.values()}
        for state in (State.STALE, State.CATCHING_UP):
            if state in states:
                return state
        return State.FRESH if states else State.STALE

    def statuses(self) -> list[StreamStatus]:
        """A look at every stream."""
        return [follower.status() for follower in self._followers.values()]

    def _find(self, topic: bytes, now: int) -> Follower | None:
        """The follower of a topic that is heard for the first time."""
        nameless = self._followers.get(None)
        if nameless is not None and nameless.topic in (None, topic):
            self._followers[topic] = nameless
            del self._followers[None]
            return nameless
        if len(self._followers) >= MAX_TOPICS:
            self.counters.too_many_topics += 1
            return None
        return self._follow(topic, now)

    def _follow(self, topic: bytes | None, now: int) -> Follower:
        follower = Follower(
            self.stream,
            topic=topic,
            prefix=self._prefix,
            source=self._source,
            limits=self._limits,
            decoder=self._decoder(),
            numbers=self._numbers,
            updates=self.updates,
        )
        self._followers[topic] = follower
        follower.start(now)
        return follower
