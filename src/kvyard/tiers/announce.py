"""How lower tiers announce what they hold, where that differs from the device: chunks, and the older, wordless form.

A chunk of several blocks is one entry, but it is announced as the blocks it is made of. Two chunks of different texts may
share their first blocks, when a common prefix ends inside a chunk; both list them, so such a block is announced twice and
removed twice, and readers must count (llm-d #680). Offload connectors of real engines do the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvyard.events.types import Event, EventBatch, Sink, Stored, Tier
from kvyard.hashing import Chain, Run


class ChunkSink:
    """Passes on to ``sink`` what a store of chunks says, as runs of blocks of ``block_sizes`` tokens per group."""

    def __init__(self, sink: Sink, block_sizes: Sequence[int]) -> None:
        self._sink = sink
        self._sizes = block_sizes

    def entered(self, run: Run, group: int, tier: Tier, first: bool) -> None:
        """Announce each chunk's blocks, whether or not another chunk has announced some of them."""
        self._sink.entered(blocks_of(run, self._sizes[group]), group, tier, first)

    def left(self, run: Run, group: int, tier: Tier, last: bool, reason: str | None = None) -> None:
        """Take back each chunk's blocks, as often as they were announced."""
        self._sink.left(blocks_of(run, self._sizes[group]), group, tier, last, reason)

    def cleared(self, tier: Tier | None = None) -> None:
        """Nothing is left of the tier."""
        self._sink.cleared(tier)


def blocks_of(run: Run, block_size: int) -> Run:
    """``run``, whose blocks are chunks, as the run of the blocks of ``block_size`` tokens that they are made of."""
    chain: Chain = run.chain.finer(block_size)
    factor = run.chain.block_size // block_size
    return Run(chain, run.start * factor, run.stop * factor)


def legacy(batch: EventBatch) -> EventBatch:
    """``batch`` with the lower tiers' Stored as older connectors send them: one event per hash, and nothing but the hash.

    The device's own events and all removals stay as they are.
    """
    events: list[Event] = []
    for event in batch.events:
        if isinstance(event, Stored) and event.tier > Tier.G1:
            events += [
                Stored(hashes=[key], parent=None, tokens=None, block_size=0, group=event.group, tier=event.tier)
                for key in event.hashes
            ]
        else:
            events.append(event)
    return msgspec.structs.replace(batch, events=events)
