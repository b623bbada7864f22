"""A port: one uvicorn server on a loop that it shares, with an end in order and one without."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

from kvyard.clock import pause
from kvyard.errors import KvyardError
from kvyard.server.heads import HEADER_BYTES, bounded, protocol
from kvyard.server.running import url_of


class Port:
    """One worker's HTTP. Starts once."""

    def __init__(self, app: Any, bound: socket.socket, drain_seconds: float) -> None:
        """Raises ``KvyardError`` without uvicorn."""
        try:
            import uvicorn
        except ImportError:
            raise KvyardError("serving needs Starlette and uvicorn: pip install 'kvyard[server]'") from None
        self.url = url_of(bound)
        self.number: int = bound.getsockname()[1]
        self._bound = bound
        self._serving: asyncio.Task[None] | None = None
        # No access log: what is logged has to be kept safe.
        self._server = uvicorn.Server(
            uvicorn.Config(
                bounded(app),
                log_level="warning",
                access_log=False,
                ws="none",
                lifespan="off",
                http=protocol(),
                h11_max_incomplete_event_size=HEADER_BYTES,
                timeout_graceful_shutdown=max(1, round(drain_seconds)),
            )
        )
        self._server.capture_signals = _no_signals  # type: ignore[method-assign]

    async def start(self) -> None:
        """Serve; returns once requests are answered."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._bound]))
        while not self._server.started and not self._serving.done():
            await pause(0.005)
        if self._serving.done():
            await self._serving

    async def stop(self) -> None:
        """Take nothing more, and wait for what is under way as long as it was allowed."""
        self._server.should_exit = True
        if self._serving is not None:
            # Not awaited itself: whoever gives up waiting must not take it down.
            await asyncio.wait((self._serving,))
            self._serving.result()

    def hurry(self) -> None:
        """Don't wait."""
        self._server.force_exit = True

    def die(self) -> None:
        """Refuse and reset everybody, at once; ``stop`` then ends what is left of it."""
        for server in self._server.servers:
            server.close()
        self._bound.close()
        for connection in list(self._server.server_state.connections):
            _abort(connection)
        self._server.should_exit = self._server.force_exit = True

    def cut(self, scope: Any) -> None:
        """Reset the connection that ``scope`` came over."""
        for connection in list(self._server.server_state.connections):
            if getattr(connection, "client", None) == scope.get("client"):
                _abort(connection)


def _abort(connection: Any) -> None:
    if connection.transport is not None:
        connection.transport.abort()


@contextlib.contextmanager
def _no_signals() -> Iterator[None]:
    """In place of uvicorn's own handling: the fleet has its own."""
    yield
