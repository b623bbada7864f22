"""Least frequently used, as SGLang's ``--radix-eviction-policy lfu``: by the number of requests that used a block, then by age.

Counts last as long as the block is cached and don't age.
"""

from kvyard.blocks.eviction.ranked import RankedOrder
from kvyard.blocks.extent import Extent, UseHistory


class LfuOrder(RankedOrder):
    """Fewest uses first, least recently used first among equals."""

    def score(self, extent: Extent, history: UseHistory) -> float:
        return float(history.uses)
