"""The one place that imports pyzmq: the rest of ``kvyard.events`` works without it."""

import socket
from contextlib import suppress
from types import ModuleType
from typing import Any

from kvyard.errors import KvyardError
from kvyard.events.transport.endpoint import is_ipv6


def require() -> ModuleType:
    """Return the ``zmq`` module. Raises ``KvyardError`` that names the extra if it isn't installed."""
    try:
        import zmq
    except ImportError:
        raise KvyardError("event streams need ZeroMQ: pip install 'kvyard[zmq]'") from None
    return zmq


def shared_context() -> Any:
    """Return the process's context, with room for as many sockets as ZeroMQ can have.

    By itself it has 1,023, and a stream takes three: a process could follow 341 engines.
    """
    zmq = require()
    context = zmq.Context.instance()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))  # counts until the first socket is made
    return context


def attach(socket: Any, endpoint: str, bind: bool) -> str:
    """Bind or connect ``socket`` and return its address, with the port that was found for port 0.

    Raises ``KvyardError`` where the address is taken, unknown or not allowed.
    """
    zmq = require()
    if is_ipv6(endpoint):
        socket.setsockopt(zmq.IPV6, 1)
    try:
        if not bind:
            socket.connect(endpoint)
            return endpoint
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        action = "bind" if bind else "connect to"
        raise KvyardError(f"can't {action} {endpoint}: {error.strerror or error}") from None
    if endpoint.startswith("tcp://") and endpoint.endswith(":0"):
        port = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        return f"{endpoint.removesuffix(':0')}:{port}"
    return endpoint


class Waker:
    """``wake`` may be called by any thread, everything else by the one that waits."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        """Return the file descriptor to poll for reading."""
        return self._read.fileno()

    def wake(self) -> None:
        """End the wait in progress, or the next one. Never blocks; once closed it does nothing."""
        with suppress(OSError):  # full: it will wake anyway
            self._write.send(b"\0")

    def rest(self) -> None:
        """Discard all wakes so far."""
        try:
            while self._read.recv(4096):
                pass
        except OSError:
            pass

    def close(self) -> None:
        """Give the sockets back."""
        self._read.close()
        self._write.close()
