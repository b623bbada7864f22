"""Totals of a link, for reports and tests."""

import msgspec


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
