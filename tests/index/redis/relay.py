"""A relay before a server that can hold what clients send, and deliver it later: even after they gave up and hung up."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any


class Relay:
    """One address before another. ``hold`` keeps what comes in, ``release`` delivers it."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._open = threading.Event()
        self._open.set()
        self._ended = False
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._begin(self._accept)

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._ended = True
        self.release()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for thread in self._threads:
            thread.join(20)
        for one in self._sockets:
            one.close()

    def _begin(self, what: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=what, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._ended:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target), timeout=20)
            except OSError:
                client.close()
                continue
            self._sockets += [client, server]
            self._begin(self._carry, client, server, True)
            self._begin(self._carry, server, client, False)

    def _carry(self, source: socket.socket, target: socket.socket, asking: bool) -> None:
        source.settimeout(0.2)
        while not self._ended:
            try:
                data = source.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError:
                break
            if asking:
                self._open.wait()
            try:
                target.sendall(data)
            except OSError:
                break
            if not data:
                break
        for one in (source, target):
            with contextlib.suppress(OSError):
                # What was sent before is delivered first.
                one.shutdown(socket.SHUT_WR)
