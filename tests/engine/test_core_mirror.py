"""The mirror is the map (I4) on the path of the mock engine: real tokens, decoding, eviction, preemption, lower tiers, hybrid
groups, through the batcher and over the wire.

Prompts are long enough for what outlives its request to be cut from its chain: a chain of fewer than 64 blocks never is.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import pytest
from tests.engine.driving import Row, drive, token_job

from kvyard.blocks import GroupSpec
from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig, SpeculativeConfig
from kvyard.engine.watcher import Watcher
from kvyard.events import Batcher, Cleared, Event, Stored, Tier
from kvyard.events.wire import Decoder, Encoder
from kvyard.hashing import Chain, Key, Run, TokenChain, wire_hash
from kvyard.tiers import OffloadConfig, TierConfig
from kvyard.tiers.links import LaneConfig, LinkConfig

LANE = LaneConfig(bandwidth=2_000_000_000, first_byte_ns=20_000)
LINK = LinkConfig(outward=LANE, inward=LANE, duplex_bandwidth=3_000_000_000)
FULL = GroupSpec(block_size=16)
WINDOW = GroupSpec(kind="sliding_window", block_size=16, window=128)
STATE = GroupSpec(kind="mamba", mode="align", block_size=16)
TIERS = OffloadConfig(tiers=(TierConfig(num_blocks=700, link=LINK), TierConfig(num_blocks=1500, link=LINK)))


def engine(*groups: GroupSpec, blocks: int = 500, **options: object) -> EngineConfig:
    return EngineConfig(
        groups=groups,
        num_gpu_blocks=blocks,
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        **options,  # type: ignore[arg-type]
    )


CONFIGS = {
    "full": engine(FULL),
    "crowded": engine(FULL, blocks=260, scheduler_reserve_full_isl=False),
    "window": engine(FULL, WINDOW),
    "state": engine(FULL, STATE),
    "drafts": engine(FULL, WINDOW, speculative=SpeculativeConfig(num_speculative_tokens=3)),
    "tiers": engine(FULL, WINDOW, bytes_per_block=1 << 18, tiers=TIERS),
    "five tiers": engine(
        FULL,
        WINDOW,
        bytes_per_block=1 << 18,
        tiers=OffloadConfig(tiers=tuple(TierConfig(num_blocks=size, link=LINK) for size in (400, 600, 900, 1500))),
    ),
    "chunks": engine(
        FULL,
        bytes_per_block=1 << 18,
        tiers=OffloadConfig(
            tiers=(TierConfig(num_blocks=300, link=LINK),), blocks_per_chunk=4, policy="write_through_generated"
        ),
    ),
}


def rows(count: int, seed: int) -> list[Row]:
    """Prompts of up to 3,500 tokens from a few families, some given up; most of the pool is for one or two of them."""
    rng = random.Random(seed)
    out = []
    now = 0
    for at in range(count):
        now += rng.choice([0, 1_000_000, 30_000_000, 200_000_000, 900_000_000])
        family, cut, length = rng.randrange(6), rng.randint(0, 7), rng.randint(20, 3500)
        ids = tuple(family * 100 + level if level < cut else 100_000 + at * 10 + level for level in range(7))
        cancel = rng.randint(0, 300_000_000) if rng.random() < 0.05 else None
        out.append(Row(now, length, rng.randint(1, 200), ids, cancel=cancel))
    return out


class Counted:
    """A consumer that counts: a block of two chunks is announced and taken back once for each."""

    def __init__(self) -> None:
        self.held: dict[tuple[int | None, Tier], Counter[Key]] = {}

    def apply(self, events: Iterable[Event]) -> None:
        for event in events:
            assert not isinstance(event, Cleared), "nothing is cleared here"
            assert event.hashes, f"an event about nothing: {event}"
            held = self.held.setdefault((event.group, event.tier), Counter())
            if isinstance(event, Stored):
                held.update(event.hashes)
            else:
                held.subtract(event.hashes)


class Consumers(Watcher):
    """One that is handed the events and one that reads them from the wire, compared with the maps."""

    def __init__(self, config: EngineConfig) -> None:
        self.near, self.far = Counted(), Counted()
        metas = [spec.meta for spec in config.specs]
        self.batcher = Batcher(metas, stream="w", with_tokens=True, snapshot=self.snapshot)
        self.core = make_core(config, name="w", watcher=self, batcher=self.batcher, plans=False)
        self.encoder, self.decoder = Encoder("vllm", groups=metas), Decoder()
        self.batches = self.preemptions = 0

    def snapshot(self):
        return self.core.snapshot()

    def preempted(self, job, now):
        self.preemptions += 1

    def announced(self, batch, now):
        self.batches += 1
        self.near.apply(batch.events)
        decoded = self.decoder.decode(self.encoder.encode(batch))
        assert not decoded.problems
        self.far.apply(decoded.events)
        for place, held in self.near.held.items():
            assert min(held.values()) >= 0, f"{place}: a block was taken back that was never announced"
        if self.batches % 10 == 0:
            self.compare()

    def compare(self):
        held: dict[tuple[int | None, Tier], Counter[Key]] = {}
        for group, tier, runs in self.core.snapshot():
            held.setdefault((group, tier), Counter()).update(key for run in runs for key in run.hashes)
        for place in held.keys() | self.near.held.keys():
            there = held.get(place, Counter())
            assert self.near.held.get(place, Counter()) == there
            assert self.far.held.get(place, Counter()) == Counter(map(wire_hash, there.elements()))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "tiers" else ()) for name in CONFIGS]
)
def test_consumers_hold_what_the_maps_hold(name):
    consumers = Consumers(CONFIGS[name])
    drive(consumers.core, rows(60, 4), make_job=token_job)
    consumers.compare()
    assert consumers.core.scheduler.manager.pool.evicted > 500, "too little pressure to show anything"
    assert consumers.preemptions or name != "crowded"
    assert consumers.batcher.counters.miscounted == 0


def test_cached_prompts_are_cut_from_their_chains():
    """What the property above depends on: without it neither the mirror nor the soak met a chain that was cut."""
    consumers = Consumers(CONFIGS["full"])
    drive(consumers.core, rows(60, 4), make_job=token_job)
    chains = {type(run.chain) for _, _, runs in consumers.core.snapshot() for run in runs}
    assert any(kind is not TokenChain and issubclass(kind, Chain) for kind in chains)


def test_blocks_announced_and_never_taken_back_are_an_integrity_error():
    consumers = Consumers(CONFIGS["full"])
    drive(consumers.core, rows(3, 4), make_job=token_job)
    [(group, tier, runs)] = consumers.core.snapshot()
    consumers.batcher.left(Run(runs[0].chain, runs[0].start, runs[0].start + 1), group, tier, True)
    with pytest.raises(AssertionError, match="I4"):
        consumers.core.check_integrity()
