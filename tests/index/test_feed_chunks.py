"""The llm-d scenario, whole: an engine whose host tier stores overlapping chunks, its events over the wire, dedup, index.

Two prompts share three blocks of 16 tokens, the tier stores chunks of two. So the chunks that hold the third block differ, and
both list it: announced twice, removed twice. The first removal must leave it, the second must drop it.
"""

from __future__ import annotations

import pytest

from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job
from kvyard.engine.watcher import Watcher
from kvyard.events.types import EventBatch, Removed, Stored, Tier
from kvyard.events.wire import Decoder, Encoder
from kvyard.hashing import TokenChain, algorithm
from kvyard.index import DedupFilter, Holder, Identity, Indexer, Place, Source
from kvyard.tiers import OffloadConfig, TierConfig
from kvyard.tiers.links import LaneConfig, LinkConfig

BLOCK = 16
SHARED = list(range(3 * BLOCK))
LANE = LaneConfig(bandwidth=1_000_000_000)


class Wire(Watcher):
    """Sends every batch through the vLLM encoding into an index that names blocks its own way."""

    def __init__(self, dedup: bool) -> None:
        self.indexer = Indexer(Identity(BLOCK), dedup=DedupFilter(enabled=dedup))
        self.indexer.register(Source(stream="w", worker="w"))
        self._encoder, self._decoder = Encoder("vllm"), Decoder()
        self.host_stores: list[list[int]] = []
        self.host_removes: list[list[int]] = []

    def announced(self, batch, now):
        decoded = self._decoder.decode(self._encoder.encode(batch))
        assert not decoded.problems
        for event in decoded.events:
            if isinstance(event, Stored) and event.tier is Tier.G2:
                self.host_stores.append(list(event.hashes))
            elif isinstance(event, Removed) and event.tier is Tier.G2:
                self.host_removes.append(list(event.hashes))
        self.indexer.apply_batch(EventBatch(stream="w", seq=batch.seq, events=list(decoded.events), ts=batch.ts), now)
        self.indexer.check_integrity()


def make(dedup: bool, host_blocks: int):
    wire = Wire(dedup)
    config = EngineConfig(
        num_gpu_blocks=8,
        block_size=BLOCK,
        bytes_per_block=1 << 16,
        tiers=OffloadConfig(
            tiers=(TierConfig(num_blocks=host_blocks, link=LinkConfig(outward=LANE, inward=LANE)),), blocks_per_chunk=2
        ),
    )
    return make_core(config, watcher=wire, events=True, with_tokens=True), wire


def run(core, name: str, tokens: list[int], start: int) -> int:
    """One request from arrival to the landing of its last store; returns when that was."""
    chain = TokenChain(tokens, BLOCK, algorithm("sha256_cbor", "engine", {}))
    core.submit(Job(name, chain, 1, arrival=start, sample=lambda low, high: [7] * (high - low)), start)
    now = start
    core.begin(now)
    while (due := core.next_decision()) is not None:
        now = due
        core.advance(now)
        core.begin(now)
        core.check_integrity()
    return now + 1


def host_has_third(wire: Wire) -> bool:
    """Return true if the index believes that the host has the third shared block."""
    place = wire.indexer.places.known(Place(Holder("w"), Tier.G2, 0))
    assert place is not None
    return wire.indexer.backend.holds(place, wire.indexer.identity.keys(SHARED)[2])


@pytest.mark.parametrize("dedup", [True, False])
def test_overlapping_chunks(dedup):
    """With ``dedup`` off, the first removal takes the block from the index though the second chunk still has it."""
    core, wire = make(dedup, host_blocks=8)
    now = run(core, "first", [*SHARED, *range(100, 100 + 2 * BLOCK)], 0)
    now = run(core, "second", [*SHARED, *range(200, 200 + 2 * BLOCK)], now)
    listed = [key for store in wire.host_stores for key in store]
    repeated = [key for key in dict.fromkeys(listed) if listed.count(key) > 1]
    assert len(repeated) == 1, "two chunks list the third block, and no other is listed twice"
    third = repeated[0]
    believed = {0: host_has_third(wire)}
    # Short prompts push chunks out of the host one by one.
    for step in range(12):
        now = run(core, f"filler{step}", [5000 + 1000 * step + at for at in range(2 * BLOCK + 1)], now)
        removals = sum(removed.count(third) for removed in wire.host_removes)
        believed.setdefault(removals, host_has_third(wire))
        if removals == 2:
            break
    assert believed == {0: True, 1: dedup, 2: False}
