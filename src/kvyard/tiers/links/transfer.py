"""What a link hands out and reports: directions, transfers, and the account of a direction. Nothing here moves a byte."""

from __future__ import annotations

from enum import IntEnum

import msgspec


class Direction(IntEnum):
    """Seen from the compute."""

    OUT = 0
    """Away from it: device to host, host to storage; writes."""
    IN = 1
    """Towards it: storage to host, host to device; loads."""


class Transfer:
    """One submission on a link. The link makes it and alone changes it; two are the same only if they are one object."""

    __slots__ = (
        "cancelled",
        "client",
        "direction",
        "ended",
        "nbytes",
        "number",
        "pieces",
        "queued",
        "started",
        "submitted",
    )

    def __init__(
        self, number: int, direction: Direction, client: str, nbytes: int, pieces: int, submitted: int
    ) -> None:
        self.number = number
        """Counts up from 0 on each link, in order of submission."""
        self.direction = direction
        self.client = client
        self.nbytes = nbytes
        self.pieces = pieces
        """Separate copies that it is made of; each costs the link its overhead."""
        self.submitted = submitted
        self.started: int | None = None
        """When its first byte can move. Known from submission, hence it may lie ahead; ``None`` if cancelled before."""
        self.ended: int | None = None
        """When its last byte had moved, or it was cancelled. ``None`` until then."""
        self.cancelled = False
        self.queued = 0
        """Nanoseconds that other transfers cost it: how much later it landed than it would have on an idle link."""

    def __repr__(self) -> str:
        state = "under way" if self.ended is None else f"{'cancelled' if self.cancelled else 'landed'} at {self.ended}"
        return (
            f"<{type(self).__name__} {self.number} {self.direction.name} {self.nbytes} B of {self.client!r}, {state}>"
        )


class LaneStats(msgspec.Struct, kw_only=True):
    """The account of one direction of a link since it was made."""

    submitted: int = 0
    landed: int = 0
    cancelled: int = 0
    bytes: int = 0
    """Payload of all that landed, and of what had moved of the cancelled; never the overhead of pieces."""
    busy_ns: int = 0
    """Time during which anything moved."""
    queued_ns: int = 0
    """Sum of ``Transfer.queued`` over all that landed."""
