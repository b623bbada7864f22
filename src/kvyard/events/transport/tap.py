"""A tap: the messages of a stream as they are, unread and unordered. For recording and checking."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any

from kvyard.clock import MS, Clock, WallClock
from kvyard.events.transport.endpoint import at_rank, is_bound_by_subscriber
from kvyard.events.transport.frames import Frame, fingerprint, read_live
from kvyard.events.transport.replay import fetch_replay
from kvyard.events.transport.zeromq import attach, require


class Tap:
    """One SUB socket. Use it in a ``with`` block."""

    def __init__(
        self, endpoint: str, *, topic: str = "", rank: int = 0, replay: str | None = None, clock: Clock | None = None
    ) -> None:
        """``replay`` is asked first for what was published before. Raises ``KvyardError`` for what isn't an endpoint."""
        self.endpoint = at_rank(endpoint, rank)
        self._replay = None if replay is None else at_rank(replay, rank)
        self._topic = topic.encode()
        self._clock = clock or WallClock()
        self._sub: Any = None

    def open(self) -> Tap:
        """Subscribe. Raises ``KvyardError`` where that can't be done."""
        zmq = require()
        self._sub = zmq.Context.instance().socket(zmq.SUB)
        try:
            self._sub.setsockopt(zmq.RCVHWM, 0)
            self._sub.setsockopt(zmq.SUBSCRIBE, self._topic)
            self.endpoint = attach(self._sub, self.endpoint, is_bound_by_subscriber(self.endpoint))
        except BaseException:
            self.close()
            raise
        return self

    def messages(self, until: int | None = None) -> Iterator[tuple[int, list[bytes]] | None]:
        """Each message with the time of its arrival, up to the time ``until`` (``None``: for ever).

        Now and then ``None`` comes instead, when nothing else does. What was replayed is not repeated when it also comes
        live. Raises ``KvyardError`` where the replay endpoint doesn't answer.
        """
        zmq = require()
        replayed: dict[tuple[bytes, int], int] = {}
        if self._replay is not None:
            self._sub.poll(100)  # the subscription should be there first, or something falls in between
            for frame in fetch_replay(self._replay):
                if frame.topic.startswith(self._topic):
                    replayed[frame.topic, frame.seq] = fingerprint(frame.payload)
                    yield self._clock.now(), frame.parts()
        while until is None or self._clock.now() < until:
            left = 200 if until is None else min(200, -(-max(0, until - self._clock.now()) // MS))
            if not self._sub.poll(left):
                yield None
                continue
            for _ in range(1000):
                try:
                    parts = self._sub.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                frame_or_not = read_live(parts) if replayed else ""
                if isinstance(frame_or_not, Frame):
                    mark = replayed.get((frame_or_not.topic, frame_or_not.seq))
                    if mark == fingerprint(frame_or_not.payload):
                        continue
                yield self._clock.now(), parts

    def close(self) -> None:
        """Close the socket; closing twice does nothing more."""
        if self._sub is not None:
            self._sub.close(linger=0)
        self._sub = None

    def __enter__(self) -> Tap:
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
