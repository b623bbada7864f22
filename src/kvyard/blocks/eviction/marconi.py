"""Marconi's cost for hybrid models (Pan et al., MLSys 25, arXiv 2411.19379): recency + alpha x FLOPs saved / bytes.

A state takes as much room after ten thousand tokens as after a hundred, but saves a hundred times the work. Blocks of one pool
have one size, so a state's worth is the work it saves over the state before it on its chain; a block of attention saves its
own tokens, like any other. Without states this is LRU.

The paper scales both terms to what is cached at the moment and tunes alpha by replaying the recent past. Here they have fixed
scales, so that the order of two blocks stays what it is: recency in units of ``window_s``, work up to ``full_credit`` tokens. A
state that saves that much stays ``alpha`` windows longer than one that saves nothing. Admission, the other half of the
paper, is what ``retention_interval`` does: states at resume points only.
"""

from collections.abc import Sequence
from typing import ClassVar

from kvyard.blocks.eviction.ranked import RankedOrder
from kvyard.blocks.extent import Extent, UseHistory
from kvyard.blocks.use import Use
from kvyard.clock import SECOND
from kvyard.registry import Option, Options


class MarconiOrder(RankedOrder):
    """Least recent first, with an allowance for work saved."""

    OPTIONS: ClassVar[Options] = {
        "alpha": Option(1.0, "Weight of saved work against recency."),
        "window_s": Option(300.0, "Seconds of recency that are worth as much as full credit.", positive=True),
        "full_credit": Option(8192, "Tokens' work per block that earns full credit.", positive=True),
        "attention_tokens": Option(
            200_000, "Tokens before one whose attention takes as much work as all else of it.", positive=True
        ),
    }
    """``attention_tokens`` is that of the paper's 7B model, which has 4 layers of attention."""
    reads_time = True

    def bounds(self, extent: Extent, use: Use, block_size: int, states: bool) -> Sequence[int]:
        # The first of several states follows a gap, the others follow each other.
        return (extent.start + 1,) if states else ()

    def note(self, extent: Extent, history: UseHistory, use: Use, block_size: int, again: bool) -> Use:
        history.worth = 0.0
        return use

    def used(self, extents: Sequence[Extent], use: Use, block_size: int, states: bool = False) -> list[Extent]:
        used = super().used(extents, use, block_size, states)
        if states:
            for extent in used:
                if extent.history is not None:
                    extent.history.worth = self.options["alpha"] * self._saved(extent, block_size)
        return used

    def score(self, extent: Extent, history: UseHistory) -> float:
        return self.now() / SECOND / self.options["window_s"] + history.worth

    def _saved(self, extent: Extent, block_size: int) -> float:
        """Return the work that a state saves over the previous state of its chain, as a share of ``full_credit``."""
        previous = extent.node.parent if extent.node is not None else None
        while previous is not None and not previous.copies:
            previous = previous.parent
        start = (previous.stop if previous is not None else 0) * block_size
        stop = (extent.start + 1) * block_size
        work = (stop - start) * (1 + (start + stop) / 2 / self.options["attention_tokens"])
        return min(1.0, work / self.options["full_credit"])
