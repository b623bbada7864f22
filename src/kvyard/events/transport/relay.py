"""A relay: frames that were somebody else's, sent on as one's own. Faults on the way out, the truth for those who ask."""

from __future__ import annotations

from kvyard.events.faults import Faults, Injector
from kvyard.events.transport.frames import Frame
from kvyard.events.transport.outlet import Outlet
from kvyard.events.wire import Decoder


class Relay:
    """Sends frames through ``outlet`` and keeps its archive as if they had all arrived."""

    def __init__(self, outlet: Outlet, faults: Faults) -> None:
        self.outlet = outlet
        self.injector = Injector(faults)
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
        for arrived in self.injector.disturb(frame):
            self.outlet.send(arrived)

    def flush(self) -> None:
        """Send what was kept back."""
        for frame in self.injector.flush():
            self.outlet.send(frame)

    def _keep(self, frame: Frame) -> Frame:
        archive = self.outlet.archive
        frame, restarted = self.injector.renumber(frame)
        if restarted or frame.seq <= archive.last:
            archive.restart(archive.epoch + 1)
        decoded = self._decoder.decode(frame.payload)
        archive.rank = decoded.rank
        archive.keep(frame.seq, frame.payload, decoded.events)
        return frame
