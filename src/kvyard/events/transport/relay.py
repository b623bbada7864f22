"""A relay: sends frames that another publisher made as its own. Faults on the way out, the truth for those who ask."""

from collections.abc import Iterable
from typing import Any

from kvyard.clock import MS, WallClock, from_seconds
from kvyard.errors import KvyardError
from kvyard.events.faults import Faults, Injector
from kvyard.events.recording import Recorded
from kvyard.events.transport.endpoint import check, is_bound_by_subscriber
from kvyard.events.transport.frames import Frame, read_live
from kvyard.events.transport.outlet import Archive, Outlet, OutletThread
from kvyard.events.transport.subscriber import READ_AT_ONCE
from kvyard.events.transport.zeromq import Waker, attach, require, shared_context
from kvyard.events.wire import Decoder
from kvyard.integers import ceil_div


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
        """Opens nothing yet. ``replay`` is the endpoint of its own replay. Raises ``KvyardError``."""
        archive = Archive(topic=None, epoch=WallClock.since_epoch().now())
        self.outlet = Outlet(endpoint, archive, replay=replay, counts_subscribers=counts_subscribers)
        self._injector = Injector(faults)
        self.faults = self._injector.counters
        """Counters of injected faults."""
        self._decoder = Decoder()

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
            self.outlet.send(arrived.parts())

    def flush(self) -> None:
        """Send what was kept back."""
        for frame in self._injector.flush():
            self.outlet.send(frame.parts())

    def _keep(self, frame: Frame) -> Frame:
        archive = self.outlet.archive
        frame, restarted = self._injector.renumber(frame)
        if restarted or frame.seq <= archive.last:
            archive.restart(archive.epoch + 1)
        decoded = self._decoder.decode(frame.payload)
        archive.rank = decoded.rank
        archive.keep(frame.seq, frame.payload, decoded.events)
        return frame


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
        self.messages = 0
        self._speed = speed
        self._clock = WallClock()
        self._waker = Waker()

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
            self.messages += 1
            bare = message.bare
            frame = message.frame() if bare is None else Frame(b"", number, bare)
            if isinstance(frame, str):
                self.outlet.send(message.parts)
            else:
                self.send(frame)
        self.flush()

    def stay(self, seconds: float | None) -> None:
        """Answer for what was played, for ``seconds`` (``None``: for ever)."""
        until = None if seconds is None else self._clock.now() + from_seconds(seconds)
        while until is None or self._clock.now() < until:
            self._serve(200 if until is None else ceil_div(until - self._clock.now(), MS))

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


class FaultProxy(OutletThread):
    """Subscribes to ``upstream`` and publishes at ``endpoint``, in a thread of its own."""

    role = "proxy"

    def __init__(self, upstream: str, endpoint: str, faults: Faults, *, replay: str | None = None) -> None:
        """Opens nothing yet. ``replay`` is the endpoint of its own replay. Raises ``KvyardError``."""
        self._relay = Relay(endpoint, faults, replay=replay)
        super().__init__(self._relay.outlet)
        self.faults = self._relay.faults
        self._upstream = check(upstream)

    def close(self, timeout: float = 0.0) -> None:
        """As any does, but what waits upstream isn't waited for."""
        super().close(timeout)

    def _open(self) -> list[Any]:
        zmq = require()
        self.outlet.open()
        sub = shared_context().socket(zmq.SUB)
        try:
            sub.setsockopt(zmq.RCVHWM, 0)
            sub.setsockopt(zmq.SUBSCRIBE, b"")
            attach(sub, self._upstream, is_bound_by_subscriber(self._upstream))
        except BaseException:
            self.outlet.close()
            sub.close(linger=0)
            raise
        return [sub]

    def _work(self, *inputs: Any) -> bool:
        zmq = require()
        for count in range(READ_AT_ONCE):
            try:
                frame = read_live(inputs[0].recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return count > 0
            if not isinstance(frame, str):
                self._relay.send(frame)
        return True
