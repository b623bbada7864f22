"""Hits per token (HPT), as proposed for SGLang in sgl-project/sglang #30300: a large run must be used more often to stay.

There a node of the radix tree is the unit, and its size changes as the tree branches. Here it is the run that one request
computed: its blocks keep that size when others share part of it, so evictions don't depend on how extents are split. In a
group with a window a request releases blocks while it runs; there a run is what leaves the window at once.
"""

from kvyard.blocks.eviction.ranked import RankedOrder
from kvyard.blocks.extent import Extent, UseHistory


class HitsPerTokenOrder(RankedOrder):
    """Fewest uses per token of its piece first, least recently used first among equals."""

    def score(self, extent: Extent, history: UseHistory) -> float:
        return history.uses / history.size if history.size else 0.0
