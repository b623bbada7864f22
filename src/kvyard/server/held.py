"""Bytes that clients make a server hold, counted from their first byte and bounded in all."""

from collections.abc import Callable

from kvyard.server.http import Refusal

HELD_BYTES = 1 << 30
"""Limit of servers that have no setting for it."""


class HeldBytes:
    """Heads, bodies and pipelined bytes of all connections of a server, until their request is over."""

    __slots__ = ("bytes", "limit", "on_refused")

    def __init__(self, limit: int = HELD_BYTES) -> None:
        self.bytes = 0
        self.limit = limit
        self.on_refused: Callable[[str, int], None] | None = None
        """Called with the path and the size of a request that there was no room for."""

    def has_room(self, more: int) -> bool:
        return self.bytes + more <= self.limit

    def refusal(self, path: str, size: int) -> Refusal:
        """For a request that there is no room for."""
        if self.on_refused is not None:
            self.on_refused(path, size)
        error = f"the requests that are here have {self.limit} bytes already"
        return Refusal(429, error, fix="try again later", Retry_After="1", Connection="close")
