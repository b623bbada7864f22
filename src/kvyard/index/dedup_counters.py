"""What the dedup filter did, apart from it so that it can be compiled."""

import msgspec


class DedupCounters(msgspec.Struct):
    """Counts of block hashes, not of events."""

    suppressed: int = 0
    """Removed on the wire, still announced otherwise: not passed on."""
    forwarded: int = 0
    """Removed and passed on."""
    uncounted: int = 0
    """Repetitions that weren't counted because the filter was full."""
