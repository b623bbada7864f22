"""Tail-optimized LRU (T-LRU, NeurIPS 25, arXiv 2510.15152; sgl-project/sglang #34012, vllm-project/vllm #37825).

A conversation has L tokens, its next prompt adds about Q, and a prefill of at most xi tokens meets the latency goal. So blocks
beyond max(0, L + Q - xi) tokens can be evicted without harm, and are evicted first. The rest is evicted by age.
"""

from collections.abc import Sequence
from typing import ClassVar

from kvyard.blocks.eviction.ranked import RankedOrder
from kvyard.blocks.extent import Extent, UseHistory
from kvyard.blocks.use import Use
from kvyard.integers import ceil_div
from kvyard.registry import Option, Options


class TailLruOrder(RankedOrder):
    """Evicts blocks that can be recomputed in time first, by age; then the rest, by age. L is that of the last request that
    used it."""

    OPTIONS: ClassVar[Options] = {
        "threshold": Option(2048, "Tokens that may be computed again (xi)."),
        "next_prompt": Option(512, "Tokens that the next turn adds (Q)."),
    }
    """The paper takes xi from the time that a first token may take; these are ours."""

    def _needed(self, use: Use, block_size: int) -> int:
        """Return the number of blocks that must stay."""
        return ceil_div(
            max(0, use.tokens + int(self.options["next_prompt"]) - int(self.options["threshold"])), block_size
        )

    def bounds(self, extent: Extent, use: Use, block_size: int, states: bool) -> Sequence[int]:
        return (self._needed(use, block_size),)

    def note(self, extent: Extent, history: UseHistory, use: Use, block_size: int, again: bool) -> Use:
        history.score = 0.0 if extent.start >= self._needed(use, block_size) else 1.0
        return use
