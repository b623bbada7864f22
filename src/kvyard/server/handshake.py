"""TLS handshakes of client connections, counted and bounded from the moment a connection is accepted.

asyncio's TLS server reports a connection only after its handshake, which may take a minute: until then silent clients would
hold memory and files that nothing counts.
"""

import asyncio
import ssl
from typing import Any

from kvyard.server.connection import ClientConnection, ServerState
from kvyard.server.held import CONNECTION_BYTES, TLS_BYTES
from kvyard.server.request import HttpRequest
from kvyard.server.transports import untie

HANDSHAKE_SECONDS = 10.0
"""Longest handshake, from the moment a connection is accepted."""


class Handshake(asyncio.Protocol):
    """One connection until its handshake is over; then a ``ClientConnection`` takes its place."""

    request: HttpRequest | None = None

    def __init__(self, state: ServerState, context: ssl.SSLContext) -> None:
        self.transport: Any = None
        self._state = state
        self._context = context
        self._task: asyncio.Task[None] | None = None
        self._received: list[bytes] = []
        """Application data that arrived with the last handshake message."""
        self._lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        if self._state.ending or not self._state.held.admit(self, CONNECTION_BYTES + TLS_BYTES):
            self.abort()
            return
        self._state.connections.add(self)
        self._task = asyncio.get_running_loop().create_task(self._shake_hands())

    def data_received(self, data: bytes) -> None:
        self._received.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True

    def abort(self) -> None:
        """End the connection at once."""
        self.transport.abort()

    make_way = shutdown = cut = abort

    async def _shake_hands(self) -> None:
        state, below = self._state, self.transport
        secured: asyncio.Transport | None = None
        try:
            secured = await asyncio.get_running_loop().start_tls(
                below, self, self._context, server_side=True, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        except OSError as error:
            error.__traceback__ = None  # breaks a reference cycle through its frames
            if isinstance(error, ConnectionAbortedError):
                state.held.refused["late"] += 1
            elif not isinstance(error, ConnectionError):  # else the client disconnected
                state.held.refused["malformed"] += 1
        finally:
            state.held.leave(self)
            if secured is not None and not self._lost and not secured.is_closing() and not state.ending:
                self._hand_over(secured)
            else:
                below.abort()
                untie(below)
            state.left(self)

    def _hand_over(self, transport: asyncio.Transport) -> None:
        """Pass the connection, and the data received so far, to a ``ClientConnection``."""
        connection = ClientConnection(self._state, self.transport)
        transport.set_protocol(connection)
        connection.connection_made(transport)
        for data in self._received:
            if not transport.is_closing():
                connection.data_received(data)
        self._received = []
