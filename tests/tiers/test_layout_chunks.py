"""Chunks of several blocks: overlapping ones announce a block twice and remove it twice, as real connectors do."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.tiers.support import BLOCK, Worker, tiers

from kvyard.blocks import GroupSpec
from kvyard.blocks.spec import ConfigError
from kvyard.events.types import EventBatch, Removed, Stored, Tier
from kvyard.hashing import Key
from kvyard.tiers import LoadStep


class ChunkWorker(Worker):
    """Its host announces blocks, and holds chunks: the mirror must count."""

    def check(self) -> None:
        self.offload.check_integrity()
        batch = self.batcher.end_iteration(0)
        if batch is not None:
            self.events += self.offload.finish_batch(batch).events
        assert counts(self.events) == expected(self), "I4, counted: announcements are not the map"


def counts(events: list[Any]) -> Counter[Key]:
    """How often each block of the host is announced and not yet removed."""
    held: Counter[Key] = Counter()
    for event in events:
        if event.tier is Tier.G2:
            (held.update if isinstance(event, Stored) else held.subtract)(event.hashes)
    assert not [key for key, count in held.items() if count < 0], "removed more often than stored"
    return +held


def expected(worker: Worker) -> Counter[Key]:
    found: Counter[Key] = Counter()
    for _, tier, runs in worker.offload.snapshot():
        assert tier is Tier.G2
        for run in runs:
            found.update(run.hashes)
    return found


def pair() -> tuple[ChunkWorker, list[Key]]:
    """Two prompts that share six blocks, stored in chunks of four: the second chunks overlap in two blocks."""
    worker = ChunkWorker(tiers(host=12, blocks_per_chunk=4))
    first = worker.run("a", [*range(24), *range(100, 109)], now=0)
    worker.run("b", [*range(24), *range(200, 209)], now=0)
    worker.settle()
    return worker, first.chain.hashes(0, 8)


def test_overlapping_chunks_are_announced_twice_and_removed_twice() -> None:
    worker, hashes = pair()
    held = counts(worker.events)
    assert [held[key] for key in hashes] == [1, 1, 1, 1, 2, 2, 1, 1]
    assert worker.offload.counters.tiers[0].stores.blocks == 12 and worker.offload.tiers[0].store.used == 3
    # Three chunks are all there is room for. The next one takes the place of the oldest, a's second.
    worker.run("c", range(300, 317), now=100_000)
    worker.settle()
    removed = [event for event in worker.events if isinstance(event, Removed) and event.tier is Tier.G2]
    assert [list(event.hashes) for event in removed] == [hashes[4:8]]
    held = counts(worker.events)
    assert [held[key] for key in hashes] == [1, 1, 1, 1, 1, 1, 0, 0]  # b's chunk still has the two
    worker.run("d", range(400, 417), now=200_000)
    worker.settle()
    assert [counts(worker.events)[key] for key in hashes] == [0, 0, 0, 0, 1, 1, 0, 0]
    worker.run("e", range(500, 517), now=300_000)
    worker.settle()
    assert [counts(worker.events)[key] for key in hashes] == [0] * 8
    twice = [event for event in worker.events if event.tier is Tier.G2 and hashes[4] in event.hashes]
    assert [type(event) for event in twice] == [Stored, Stored, Removed, Removed]


def test_a_chunk_is_described_whole() -> None:
    worker, hashes = pair()
    stored = [event for event in worker.events if isinstance(event, Stored) and event.tier is Tier.G2]
    assert [(len(event.hashes), event.block_size, event.parent) for event in stored] == [
        (8, 4, None),
        (4, 4, hashes[3]),
    ]
    assert list(stored[0].tokens or ()) == [*range(24), *range(100, 108)]


def test_only_whole_chunks_are_stored_and_loaded() -> None:
    worker = ChunkWorker(tiers(blocks_per_chunk=4))
    worker.finish(worker.run("a", range(45), now=0), 1)  # eleven blocks: two chunks
    worker.settle()
    assert worker.offload.counters.tiers[0].stores.blocks == 8
    worker.evict_all()
    worker.finish(worker.run("b", range(21), now=100_000), 100_001)  # five blocks on the device: a chunk and one more
    again = worker.make("c", range(45))
    outcome = worker.onboard(again, 200_000)
    assert (outcome.step, outcome.tokens) == (LoadStep.STARTED, 12)
    worker.settle()
    assert worker.offload.counters.tiers[0].loads.bytes == 3 * BLOCK  # the rest of the second chunk
    assert again.num_computed_tokens == 32


def test_legacy_events_name_chunks_and_say_nothing_else() -> None:
    worker = Worker(tiers(host=12, blocks_per_chunk=4, events="legacy"))
    request = worker.run("a", [*range(24), *range(100, 109)], now=0)
    worker.offload.tick(100_000)
    batch = worker.batcher.end_iteration(0)
    assert batch is not None
    finished = worker.offload.finish_batch(batch)
    hashes = request.chain.hashes(0, 8)
    host = [event for event in finished.events if event.tier is Tier.G2]
    assert host == [
        Stored(hashes=[key], parent=None, tokens=None, block_size=0, group=0, tier=Tier.G2)
        for key in (hashes[3], hashes[7])
    ]
    assert isinstance(finished, EventBatch) and finished.seq == batch.seq


def test_legacy_events_of_single_blocks() -> None:
    worker = Worker(tiers(events="legacy"))
    request = worker.run("a", range(13), now=0)
    device = worker.batcher.end_iteration(0)
    assert device is None or worker.offload.finish_batch(device) == device
    worker.offload.tick(100_000)
    batch = worker.batcher.end_iteration(0)
    assert batch is not None
    events = worker.offload.finish_batch(batch).events
    assert [(event.hashes, event.tokens, event.block_size) for event in events if isinstance(event, Stored)] == [
        ([key], None, 0) for key in request.chain.hashes(0, 3)
    ]


def test_states_do_not_come_in_chunks() -> None:
    with pytest.raises(ConfigError, match="states are kept one by one"):
        Worker(tiers(blocks_per_chunk=2), groups=[GroupSpec(), GroupSpec(kind="mamba")])


def test_a_tier_smaller_than_a_chunk_is_refused() -> None:
    with pytest.raises(ConfigError, match="doesn't hold a single chunk of 4"):
        Worker(tiers(host=3, blocks_per_chunk=4))
