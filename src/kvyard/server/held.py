"""Bytes that clients make a server hold, counted from their first byte and bounded in all."""

from collections.abc import Callable, Iterator

from kvyard.index.metrics import Sample
from kvyard.server.http import Refusal

HELD_BYTES = 1 << 30
"""Limit of servers that have no setting for it."""
CONNECTION_BYTES = 8 << 10
"""Bytes that a connection takes by itself."""
TLS_BYTES = 64 << 10
"""Further bytes of a connection with TLS."""

REASONS = {
    "head": "the head is too long",
    "body": "the body is too long",
    "held": "there is no room for the request",
    "connections": "there is no room for the connection",
    "pipelined": "too much follows a request before its answer",
    "unread": "the answer isn't read",
    "late": "the head or the body takes too long",
    "malformed": "it is no HTTP request",
}
"""Why a server refuses a client or closes its connection before the application is asked."""


class HeldBytes:
    """Heads, bodies, pipelined bytes and unread answers of all connections of a server, and the connections themselves."""

    __slots__ = ("bytes", "connection_bytes", "limit", "on_refused", "refused")

    def __init__(self, limit: int = HELD_BYTES) -> None:
        self.bytes = 0
        self.connection_bytes = 0
        """Bytes of connections, beside ``bytes``."""
        self.limit = limit
        self.refused = dict.fromkeys(REASONS, 0)
        """Refusals and closed connections by reason."""
        self.on_refused: Callable[[str, int], None] | None = None
        """Called with the path and the size of a request that there was no room for."""

    def has_room(self, more: int) -> bool:
        return self.bytes + self.connection_bytes + more <= self.limit

    def has_room_for_connection(self, size: int) -> bool:
        """Connections have half of the limit for themselves, so that health checks get in whatever bodies take."""
        return self.connection_bytes + size <= self.limit // 2

    def refusal(self, path: str, size: int) -> Refusal:
        """For a request that there is no room for."""
        self.refused["held"] += 1
        if self.on_refused is not None:
            self.on_refused(path, size)
        error = f"the requests that are here have {self.limit} bytes already"
        return Refusal(429, error, fix="try again later", Retry_After="1", Connection="close")

    def samples(self, prefix: str) -> Iterator[Sample]:
        """Metrics, by names that begin with ``prefix``."""
        yield f"{prefix}held_bytes", {}, self.bytes + self.connection_bytes
        for reason, count in self.refused.items():
            yield f"{prefix}edge_refusals_total", {"reason": reason}, count
