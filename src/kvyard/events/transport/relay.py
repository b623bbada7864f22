"""A relay: sends frames that another publisher made as its own. Faults on the way out, the truth for those who ask."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import msgspec

from kvyard.clock import MS, WallClock, from_seconds
from kvyard.errors import KvyardError
from kvyard.events.faults import FaultCounters, Faults, Injector
from kvyard.events.recording import Recorded
from kvyard.events.transport.endpoint import check, is_bound_by_subscriber
from kvyard.events.transport.frames import Frame, read_live
from kvyard.events.transport.outlet import Archive, Outlet
from kvyard.events.transport.subscriber import READ_AT_ONCE
from kvyard.events.transport.zeromq import Waker, attach, require
from kvyard.events.wire import Decoder


class Relay:
    """An outlet with faults, whose archive is kept as if every frame had arrived."""

    def __init__(
        self,
        endpoint: str,
        faults: Faults,
        *,
        replay: str | None,
        counts_subscribers: bool = False,
    ) -> None:
        """Nothing is opened yet. ``replay`` is where it answers for what it sent. Raises ``KvyardError``."""
        archive = Archive(topic=None, epoch=WallClock.since_epoch().now())
        self.outlet = Outlet(endpoint, archive, replay=replay, counts_subscribers=counts_subscribers)
        self._injector = Injector(faults)
        self._decoder = Decoder()

    @property
    def endpoint(self) -> str:
        """Where the stream is."""
        return self.outlet.endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """Where what was lost can be had."""
        return self.outlet.replay_endpoint

    @property
    def faults(self) -> FaultCounters:
        """What was done to the stream."""
        return self._injector.counters

    def send(self, frame: Frame) -> None:
        """Send ``frame`` on, or whatever becomes of it.

        The archive is of one stream, the first topic that comes along; others pass without being kept.
        """
        archive = self.outlet.archive
        if archive.topic is None:
            archive.topic = frame.topic
        if frame.topic == archive.topic:
            frame = self._keep(frame)
        for arrived in self._injector.disturb(frame):
            self.outlet.send(arrived)

    def flush(self) -> None:
        """Send what was kept back."""
        for frame in self._injector.flush():
            self.outlet.send(frame)

    def _keep(self, frame: Frame) -> Frame:
        archive = self.outlet.archive
        frame, restarted = self._injector.renumber(frame)
        if restarted or frame.seq <= archive.last:
            archive.restart(archive.epoch + 1)
        decoded = self._decoder.decode(frame.payload)
        archive.rank = decoded.rank
        archive.keep(frame.seq, frame.payload, decoded.events)
        return frame


class PlayCounters(msgspec.Struct):
    """What was played."""

    messages: int = 0
    malformed: int = 0
    """Sent as they were recorded, though they are no batches."""


class Player(Relay):
    """Publishes recorded messages, and answers for them. Works in the caller's thread."""

    def __init__(
        self,
        endpoint: str,
        *,
        replay: str | None = None,
        speed: float = 1.0,
        faults: Faults | None = None,
    ) -> None:
        """``speed`` scales the pace; 0 is as fast as can be. Raises ``KvyardError`` for a negative one or a bad endpoint."""
        if speed < 0:
            raise KvyardError(f"speed is 0 (no pauses) or more, got {speed:g}")
        super().__init__(endpoint, faults or Faults(), replay=replay, counts_subscribers=True)
        self.counters = PlayCounters()
        self._speed = speed
        self._clock = WallClock()
        self._waker = Waker()

    def open(self) -> None:
        """Open the sockets. Raises ``KvyardError`` where that can't be done."""
        self.outlet.open()

    def wait_for_subscribers(self, count: int) -> None:
        """Wait until ``count`` subscribe; what is published before is lost on them."""
        while self.outlet.subscribers < count:
            self._serve(200)

    def play(self, messages: Iterable[Recorded]) -> None:
        """Send ``messages``, in time."""
        start = self._clock.now()
        for number, message in enumerate(messages):
            if self._speed:
                self._serve_until(start + round(message.at / self._speed))
            self.outlet.serve()
            self.counters.messages += 1
            bare = message.bare
            frame = message.frame() if bare is None else Frame(b"", number, bare)
            if isinstance(frame, str):
                self.counters.malformed += 1
                self.outlet.send_parts(message.parts)
            else:
                self.send(frame)
        self.flush()

    def stay(self, seconds: float | None) -> None:
        """Answer for what was played, for ``seconds`` (``None``: for ever)."""
        until = None if seconds is None else self._clock.now() + from_seconds(seconds)
        while until is None or self._clock.now() < until:
            self._serve(200 if until is None else -(-(until - self._clock.now()) // MS))

    def close(self) -> None:
        """Close the sockets, once what was sent has left."""
        self.outlet.close()
        self._waker.close()

    def _serve_until(self, t: int) -> None:
        while (left := t - self._clock.now()) > 0:
            if left < 2 * MS:
                self._clock.sleep_until(t)
            else:
                self._serve(left // MS)

    def _serve(self, ms: int) -> None:
        if not self.outlet.serve():
            self.outlet.wait(10 if self.outlet.busy else min(ms, 200), self._waker)
            self.outlet.serve()


class FaultProxy(Relay):
    """Subscribes to ``upstream`` and publishes at ``endpoint``, in a thread of its own."""

    def __init__(self, upstream: str, endpoint: str, faults: Faults, *, replay: str | None = None) -> None:
        """Nothing is opened yet. ``replay`` is where it answers for what it sent. Raises ``KvyardError``."""
        super().__init__(endpoint, faults, replay=replay)
        self._upstream = check(upstream)
        self._sub: Any = None
        self._waker: Waker | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False

    def start(self) -> FaultProxy:
        """Open the sockets and begin. Raises ``KvyardError``, with nothing left open, where that fails."""
        if self._thread is not None or self._stopping:
            raise KvyardError("a proxy starts once: make another")
        zmq = require()
        self.outlet.open()
        try:
            self._sub = zmq.Context.instance().socket(zmq.SUB)
            self._sub.setsockopt(zmq.RCVHWM, 0)
            self._sub.setsockopt(zmq.SUBSCRIBE, b"")
            attach(self._sub, self._upstream, is_bound_by_subscriber(self._upstream))
        except BaseException:
            self._close()
            raise
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name=f"kvyard-proxy {self.endpoint}", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """End the thread and close the sockets; closing twice does nothing more."""
        self._stopping = True
        thread, self._thread = self._thread, None
        if thread is not None and self._waker is not None:
            self._waker.wake()
            thread.join()
            self._waker.close()

    def __enter__(self) -> FaultProxy:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _run(self) -> None:
        assert self._waker is not None
        try:
            while not self._stopping:
                moved = self.outlet.serve() | self._forward()
                if not moved:
                    self.outlet.wait(10 if self.outlet.busy else 1000, self._waker, self._sub)
        finally:
            self._close()

    def _forward(self) -> bool:
        zmq = require()
        for count in range(READ_AT_ONCE):
            try:
                frame = read_live(self._sub.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return count > 0
            if not isinstance(frame, str):
                self.send(frame)
        return True

    def _close(self) -> None:
        self.outlet.close()
        if self._sub is not None:
            self._sub.close(linger=0)
            self._sub = None
