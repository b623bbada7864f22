"""A relay: sends frames that another publisher made as its own. Faults on the way out, the truth for those who ask."""

from __future__ import annotations

from kvyard.clock import WallClock
from kvyard.events.faults import FaultCounters, Faults, Injector
from kvyard.events.mirror import Mirror
from kvyard.events.transport.archive import Archive
from kvyard.events.transport.frames import Frame
from kvyard.events.transport.outlet import Outlet
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

    @property
    def mirror(self) -> Mirror:
        """What a reader that recovered from everything holds. Look at it when nothing is being sent."""
        mirror = self.outlet.archive.mirror
        assert mirror is not None
        return mirror

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
