"""Playing a recording: its messages again, at the pace at which they came or another, with faults if wanted."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvyard.clock import MS, WallClock, from_seconds
from kvyard.errors import KvyardError
from kvyard.events.faults import Faults
from kvyard.events.recording import Recorded
from kvyard.events.transport.frames import Frame
from kvyard.events.transport.outlet import OutletCounters
from kvyard.events.transport.relay import Relay
from kvyard.events.transport.waker import Waker


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

    @property
    def sent(self) -> OutletCounters:
        """What went out and what was asked."""
        return self.outlet.counters

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
