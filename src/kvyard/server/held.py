"""Bytes and connections that clients make a server hold, counted from the first and bounded in all."""

from collections.abc import Callable, Iterator
from typing import Protocol

from kvyard.index.metrics import Sample
from kvyard.server.http import Refusal

HELD_BYTES = 1 << 30
"""Limit of servers that have no setting for it."""
CONNECTION_BYTES = 8 << 10
"""Bytes that a connection takes by itself."""
TLS_BYTES = 96 << 10
"""Further bytes of a connection with TLS, from the moment it is accepted."""

REASONS = {
    "head": "the head is too long",
    "body": "the body is too long",
    "held": "there is no room for the request",
    "connections": "there is no room for all connections",
    "pipelined": "too much follows a request before its answer",
    "unread": "the answer isn't read",
    "late": "the head or the body takes too long",
    "malformed": "it is no HTTP request",
}
"""Why a server refuses a client or closes its connection before the application is asked."""


class OpenConnection(Protocol):
    """A client's connection."""

    def make_way(self) -> None:
        """End at once, in favour of another connection."""


class HeldBytes:
    """Heads, bodies, pipelined bytes and unread answers of all connections of a server, and the connections themselves."""

    __slots__ = ("_sizes", "bytes", "connection_bytes", "connections", "limit", "on_refused", "refused", "silent")

    def __init__(self, limit: int = HELD_BYTES) -> None:
        self.bytes = 0
        self.connection_bytes = 0
        """Bytes of connections, beside ``bytes``."""
        self.limit = limit
        self.connections: int | None = None
        """Limit of the number of connections; ``None``: their bytes bound it."""
        self._sizes: dict[OpenConnection, int] = {}
        """Bytes of each connection."""
        self.silent: dict[OpenConnection, None] = {}
        """Connections without a request, the longest silent first."""
        self.refused = dict.fromkeys(REASONS, 0)
        """Refusals and closed connections by reason."""
        self.on_refused: Callable[[str, int], None] | None = None
        """Called with the path and the size of a request that there was no room for."""

    def has_room(self, more: int) -> bool:
        return self.bytes + self.connection_bytes + more <= self.limit

    def admit(self, connection: OpenConnection, size: int) -> bool:
        """Count a connection of ``size`` bytes. If there is no room, those that have been silent the longest make way; returns
        False if none is. Connections have half of the limit for themselves, so that health checks get in whatever bodies take.
        """
        most = self.limit // 2
        while self.connection_bytes + size > most or (
            self.connections is not None and len(self._sizes) >= self.connections
        ):
            oldest = next(iter(self.silent), None)
            if oldest is None:
                self.refused["connections"] += 1
                return False
            self.leave(oldest)
            self.refused["connections"] += 1
            oldest.make_way()
        self._sizes[connection] = size
        self.connection_bytes += size
        self.silent[connection] = None
        return True

    def leave(self, connection: OpenConnection) -> None:
        """Count a connection no more."""
        self.connection_bytes -= self._sizes.pop(connection, 0)
        self.silent.pop(connection, None)

    def refusal(self, path: str, size: int) -> Refusal:
        """Return the refusal of a request for which there is no room."""
        self.refused["held"] += 1
        if self.on_refused is not None:
            self.on_refused(path, size)
        error = f"requests in progress hold {self.limit} bytes already"
        return Refusal(429, error, fix="try again later", Retry_After="1", Connection="close")

    def samples(self, prefix: str) -> Iterator[Sample]:
        """Yield metrics, with names that begin with ``prefix``."""
        yield f"{prefix}held_bytes", {}, self.bytes + self.connection_bytes
        for reason, count in self.refused.items():
            yield f"{prefix}edge_refusals_total", {"reason": reason}, count
