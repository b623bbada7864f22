"""Belady's rule, an oracle: evict what is used again last of all (L. A. Belady, 1966). For replays: it needs the future.

Along a chain what comes later is used again no earlier, so a chain loses its tail first here too. The future is the trace's: by
order of requests, not by time, and it doesn't say to which of several workers a request will go.
"""

from collections.abc import Sequence

from kvyard.blocks.eviction.ranked import RankedOrder
from kvyard.blocks.extent import Extent, UseHistory
from kvyard.blocks.use import NEVER_AGAIN, Use
from kvyard.integers import ceil_div


class BeladyOrder(RankedOrder):
    """Furthest next use first, never used again before all others."""

    needs_future = True

    def bounds(self, extent: Extent, use: Use, block_size: int, states: bool) -> Sequence[int]:
        return [ceil_div(tokens, block_size) for tokens, _ in use.facts.next_uses]

    def note(self, extent: Extent, history: UseHistory, use: Use, block_size: int, again: bool) -> Use:
        previous = history.use
        if previous is not None and previous.facts.number > use.facts.number:
            return previous  # a request that came later has ended earlier, and knows more
        after = NEVER_AGAIN
        for tokens, number in use.facts.next_uses:
            if extent.start * block_size < tokens:
                after = number
                break
        history.score = -float(after)
        return use
