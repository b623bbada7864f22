"""A soak: 900 requests through a hybrid engine with draft tokens and lower tiers, under pressure, some of them given up.

Every request leaves exactly once, nothing leaks on any tier, and a mirror built from the events ends as the map.
"""

from __future__ import annotations

import random

import pytest
from tests.engine.driving import Log, Row, drive

from kvyard.blocks import GroupSpec
from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig, SpeculativeConfig
from kvyard.events import Mirror
from kvyard.events.types import Tier
from kvyard.tiers import OffloadConfig, TierConfig
from kvyard.tiers.links import LaneConfig, LinkConfig

LANE = LaneConfig(bandwidth=2_000_000_000, first_byte_ns=20_000)
LINK = LinkConfig(outward=LANE, inward=LANE, duplex_bandwidth=3_000_000_000)

CONFIGS = {
    "window": EngineConfig(
        groups=(
            GroupSpec(kind="full", block_size=16),
            GroupSpec(kind="sliding_window", block_size=16, window=128),
        ),
        num_gpu_blocks=400,
        max_num_seqs=24,
        max_num_batched_tokens=1024,
        speculative=SpeculativeConfig(num_speculative_tokens=3, acceptance_rates=(0.8, 0.6, 0.4)),
        bytes_per_block=1 << 18,
        tiers=OffloadConfig(tiers=(TierConfig(num_blocks=900, link=LINK), TierConfig(num_blocks=2500, link=LINK))),
    ),
    "generated too": EngineConfig(
        groups=(
            GroupSpec(kind="full", block_size=16),
            GroupSpec(kind="sliding_window", block_size=16, window=128),
        ),
        num_gpu_blocks=400,
        max_num_seqs=24,
        max_num_batched_tokens=1024,
        scheduler_reserve_full_isl=False,
        speculative=SpeculativeConfig(num_speculative_tokens=2),
        bytes_per_block=1 << 18,
        tiers=OffloadConfig(tiers=(TierConfig(num_blocks=700, link=LINK),), policy="write_through_generated"),
    ),
}


def rows(count: int, seed: int) -> list[Row]:
    """Prompts from a few families, in bursts; one in twenty is given up."""
    rng = random.Random(seed)
    out = []
    now = 0
    for at in range(count):
        now += rng.choice([0, 1_000_000, 30_000_000, 200_000_000])
        family = rng.randrange(30)
        length = rng.randint(20, 1400)
        cut = rng.randint(1, 3)
        ids = tuple(family * 100 + level if level < cut else 100_000 + at * 10 + level for level in range(3))
        cancel = rng.randint(0, 300_000_000) if rng.random() < 0.05 else None
        out.append(Row(now, length, rng.randint(1, 80), ids, cancel=cancel))
    return out


class Watch(Log):
    """Mirrors what is announced."""

    def __init__(self) -> None:
        super().__init__()
        self.mirror = Mirror()

    def announced(self, batch, now):
        self.mirror.apply(batch.events)


def held_by(core) -> dict[tuple[int, Tier], set[object]]:
    """Return the contents of the maps of all tiers, per (group, tier)."""
    held: dict[tuple[int, Tier], set[object]] = {}
    for group, tier, runs in core.snapshot():
        held.setdefault((group, tier), set()).update(key for run in runs for key in run.hashes)
    return {key: value for key, value in held.items() if value}


def soak(config: EngineConfig, count: int, seed: int) -> Watch:
    watch = Watch()
    core = make_core(config, watcher=watch, events=True)
    jobs = drive(core, rows(count, seed))
    ended = [name for name, *_ in watch.of("ended")]
    assert sorted(ended) == sorted(job.id for job in jobs), "each leaves exactly once (I9)"
    pool, host = core.scheduler.manager.pool, core.offload.tiers[0].store
    assert pool.free == pool.num_blocks - 1 and host.pool.free == host.num_pages, "nothing is held any more (I2)"
    mirrored = {key: set(value) for key, value in watch.mirror.held.items() if value}
    assert mirrored == held_by(core), "the mirror is the map (I4)"
    counters = core.offload.counters
    assert counters.tiers[0].stores.landed > count // 10 and counters.tiers[0].loads.landed > count // 50
    assert watch.of("preempted") and watch.of("loading")
    return watch


@pytest.mark.parametrize("name", CONFIGS)
def test_a_hundred_and_fifty(name):
    soak(CONFIGS[name], 150, 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CONFIGS)
def test_nine_hundred(name):
    soak(CONFIGS[name], 900, 2)
