"""A proxy that makes faults happen between a publisher and its subscribers.

It stands in for the publisher: what subscribers miss they can ask it for, and its answers are without fault. So a reader that
recovers as it should ends up whole behind it, and one that doesn't shows it.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from kvyard.errors import KvyardError
from kvyard.events.faults import Faults
from kvyard.events.transport.endpoint import check, is_bound_by_subscriber
from kvyard.events.transport.frames import read_live
from kvyard.events.transport.relay import Relay
from kvyard.events.transport.sockets import READ_AT_ONCE
from kvyard.events.transport.waker import Waker
from kvyard.events.transport.zeromq import attach, require


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
