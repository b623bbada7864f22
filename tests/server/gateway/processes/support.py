"""Several gateways that are processes to each other: on ports of their own, in threads, with a real hub between them."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tests.server.gateway.support import PATIENCE, Gated

from kvyard.server.gateway.processes.channel import Channel
from kvyard.server.gateway.processes.frames import HUB, FrameKind
from kvyard.server.gateway.processes.hub import Hub


class HubThread:
    """A hub that serves until the block is left."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self._deeds: queue.Queue[Callable[[], None]] = queue.Queue()
        self._ending = False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ending:
            while not self._deeds.empty():
                self._deeds.get()()
            self.hub.wait(0.002)

    def do(self, deed: Callable[[], None]) -> None:
        """Have the hub's thread do something, and wait until it has."""
        done = threading.Event()

        def act() -> None:
            deed()
            done.set()

        self._deeds.put(act)
        assert done.wait(PATIENCE)

    def join(self, number: int, processes: int) -> Channel:
        """A channel for one more process."""
        ours, theirs = socket.socketpair()
        self.do(lambda: self.hub.add(number, ours))
        return Channel(theirs, number, processes)

    def __enter__(self) -> HubThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        self._thread.join(PATIENCE)
        self.hub.close()


@contextlib.contextmanager
def several(count: int, hub: Hub | None = None, **settings: Any) -> Iterator[tuple[list[Gated], HubThread]]:
    """So many gateways with one view."""
    with contextlib.ExitStack() as stack:
        between = stack.enter_context(HubThread(hub or Hub(count)))
        found = [stack.enter_context(joined(between, number + 1, count, **settings)) for number in range(count)]
        yield found, between


@contextlib.contextmanager
def joined(between: HubThread, number: int, count: int, **settings: Any) -> Iterator[Gated]:
    """One more, which leaves with the block."""
    channel = between.join(number, count)
    with Gated(channel=channel, **settings) as gated:
        channel.send(FrameKind.READY, HUB, b"0")  # as a process does once it serves
        yield gated
    between.do(lambda: between.hub.remove(number))
