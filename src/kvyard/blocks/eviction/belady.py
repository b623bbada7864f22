"""Belady's rule, an oracle: evict the block with the furthest next use (L. A. Belady, 1966). For replays: it needs the future.

A later block of a chain is never used again before an earlier one, so a chain loses its tail first here too. The future is the
order of requests in the trace, without times and without the worker that each request will be routed to.
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
            return previous  # recorded by a later request, which knows more of the future
        next_use = NEVER_AGAIN
        for tokens, number in use.facts.next_uses:
            if extent.start * block_size < tokens:
                next_use = number
                break
        history.score = -float(next_use)
        return use
