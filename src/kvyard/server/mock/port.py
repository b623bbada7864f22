"""A port: one uvicorn server on a loop that it shares, with an end in order and one without."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import msgspec

from kvyard.clock import pause
from kvyard.errors import KvyardError
from kvyard.server.http import JSON, Refusal
from kvyard.server.mock.words import worded
from kvyard.server.running import url_of

HEADER_BYTES = 64 << 10
"""What the head of a request may have. Uvicorn only bounds heads that come in pieces, so all others are counted here."""


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


def bounded(app: Any) -> Any:
    """``app`` behind a look at the size of headers."""
    status, problem = worded(Refusal(431, f"headers are longer than {HEADER_BYTES} bytes", fix="send less"))
    body = msgspec.json.encode(problem)
    headers = [
        (b"content-type", JSON.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]

    async def outer(scope: Any, receive: Any, send: Any) -> None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > HEADER_BYTES:
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        else:
            await app(scope, receive, send)

    return outer


def _abort(connection: Any) -> None:
    if connection.transport is not None:
        connection.transport.abort()


@contextlib.contextmanager
def _no_signals() -> Iterator[None]:
    """In place of uvicorn's own handling: the fleet has its own."""
    yield
