"""Counters of the dedup filter, in a module of their own so that the filter can be compiled."""

import msgspec


class DedupCounters(msgspec.Struct):
    """Counts of block hashes, not of events."""

    suppressed: int = 0
    """Removed on the wire, still announced otherwise: not passed on."""
    forwarded: int = 0
    """Removed and passed on."""
    uncounted: int = 0
    """Repetitions that weren't counted because the filter was full."""
