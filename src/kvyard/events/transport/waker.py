"""A waker: lets one thread end another's wait for sockets. A pair of ordinary sockets, which every system can poll."""

from __future__ import annotations

import socket


class Waker:
    """``wake`` may be called by any thread, everything else by the one that waits."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        """What to poll for reading."""
        return self._read.fileno()

    def wake(self) -> None:
        """End the wait under way, or the next one. Never blocks; once closed it does nothing."""
        try:
            self._write.send(b"\0")
        except OSError:
            pass  # full: it will wake anyway

    def rest(self) -> None:
        """Forget all wakes so far."""
        try:
            while self._read.recv(4096):
                pass
        except OSError:
            pass

    def close(self) -> None:
        """Give the sockets back."""
        self._read.close()
        self._write.close()
