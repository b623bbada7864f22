"""Bytes survive the way from device to host to storage and back, whatever else goes on. See ``content.py``."""

from __future__ import annotations

from typing import Any

import pytest
from tests.blocks.content import Corrupted, pool_for
from tests.blocks.support import FULL
from tests.tiers.content import TieredEngine, TieredTraffic
from tests.tiers.support import link, tiers

from kvyard.blocks import GroupSpec
from kvyard.blocks.extent import Extent
from kvyard.blocks.holds import Holds
from kvyard.blocks.pool import Pool
from kvyard.blocks.table import BlockTable
from kvyard.tiers.layout import PageLayout
from kvyard.tiers.store import TierStore
from kvyard.tiers.storer import Storer


def spec(kind: str, size: int = 4, **fields: Any) -> GroupSpec:
    return GroupSpec(kind=kind, block_size=size, **fields)


NARROW = spec("sliding_window", window=10)

SETS: dict[str, tuple[list[GroupSpec], dict[str, Any], dict[str, Any], int]] = {
    "full": ([FULL], {}, {}, 0),
    "window": ([NARROW], {}, {}, 0),
    "full+window": ([FULL, NARROW], {}, {}, 0),
    "full+chunked": ([FULL, spec("chunked_local", chunk=8)], {}, {}, 0),
    "full+states": ([FULL, spec("mamba", mode="all")], {}, {}, 0),
    "full+aligned": ([FULL, spec("mamba")], {}, {}, 0),
    "full+window+aligned": ([FULL, NARROW, spec("mamba")], {}, {}, 0),
    "mixed-sizes": ([spec("full", 8), spec("sliding_window", 2, window=7)], {}, {}, 0),
    "inside-blocks": ([spec("full", 8), spec("mamba", 8)], {"hash_block_size": 2}, {}, 0),
    "eagle": ([FULL, NARROW], {"use_eagle": True}, {}, 3),
    "drafts-aligned": ([FULL, spec("mamba", spec_blocks=3)], {}, {}, 3),
    "retain-0": ([FULL, NARROW], {"retention_interval": 0}, {}, 0),
    "overlap": ([FULL, NARROW], {"overlap": True}, {}, 0),
    "priority": ([FULL, NARROW], {"eviction": "priority"}, {}, 0),
    "generated": ([FULL, NARROW], {}, {"policy": "write_through_generated"}, 0),
    "after-hits": ([FULL, NARROW], {}, {"policy": "after_hits"}, 0),
    "on-eviction": ([FULL, NARROW], {}, {"policy": "on_eviction", "offload_ahead": 6}, 0),
    "on-eviction-drop": ([FULL], {}, {"policy": "on_eviction", "offload_ahead": 4, "on_unclean": "drop"}, 0),
    "lazy": ([FULL], {}, {"policy": "lazy"}, 0),
    "exclusive": ([FULL, NARROW], {}, {"policy": "exclusive", "offload_ahead": 6}, 0),
    "on-eviction-aligned": ([FULL, spec("mamba")], {}, {"policy": "on_eviction", "offload_ahead": 9}, 0),
    "chunks": ([FULL], {}, {"blocks_per_chunk": 3}, 0),
    "chunks+window": ([FULL, NARROW], {}, {"blocks_per_chunk": 2}, 0),
    "batches": ([FULL, NARROW], {}, {"offload_batch_size": 3}, 0),
    "fair": ([FULL, NARROW], {}, {"host_keys": {"link": link(discipline="fair", latency=100)}}, 0),
}


WRITE_BACK = {
    "write-back": ([FULL, NARROW], {}, {"spill": "on_eviction"}, 0),
    "write-back, lazy": ([FULL], {}, {"spill": "on_eviction", "policy": "lazy"}, 0),
    "write-back, exclusive": ([FULL, NARROW], {}, {"spill": "on_eviction", "policy": "exclusive"}, 0),
}
LOWER = {"host": (), "storage": (300,), "remote": (30, 300)}


@pytest.mark.parametrize(
    ("name", "lower"),
    [(name, lower) for name in SETS for lower in LOWER]
    + [(name, lower) for name in WRITE_BACK for lower in ("storage", "remote")],
)
def test_bytes_survive(name: str, lower: str) -> None:
    groups, options, offload, drafts = (SETS | WRITE_BACK)[name]
    _survive(groups, options, offload, drafts, LOWER[lower])


def _survive(
    groups: list[GroupSpec], options: dict[str, Any], offload: dict[str, Any], drafts: int, lower: tuple[int, ...]
) -> None:
    device = pool_for(groups)
    host = device if lower else 2 * device
    engine = TieredEngine(device, groups, tiers(host, *lower, **offload), **options)
    walk = TieredTraffic(engine, 2 if lower else 1, drafts)
    for _ in range(40):
        walk.run(10)
        engine.offload.check_integrity()
    for job in list(engine.jobs.values()):
        engine.finish(job)
    for job in list(engine.waiting.values()):
        engine.offload.forget(job.request, engine.now)
    while (at := engine.offload.earliest_deadline()) is not None:
        engine.tick(at)
    engine.verify()
    engine.offload.check_integrity()
    assert engine.manager.pool.free == engine.manager.pool.num_blocks - 1, "the device lost blocks"
    for tier in engine.offload.tiers:
        assert tier.store.pool.free == tier.store.num_pages, f"{tier.store.tier.name} lost pages"
        assert not tier.in_flight
    counters = engine.offload.counters
    assert counters.tiers[0].loads.landed > 2 and walk.done["preempted"] > 5, "hardly anything happened"
    for tier in counters.tiers:
        assert tier.stores.submitted == tier.stores.landed > 5
        assert tier.loads.submitted == tier.loads.landed


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SETS)
def test_for_a_long_time(name: str) -> None:
    groups, options, offload, drafts = SETS[name]
    for seed in range(100, 106):
        device = pool_for(groups, 1 + seed % 2)
        engine = TieredEngine(device, groups, tiers(device + 7 * (seed % 5), 4 * device, **offload), **options)
        TieredTraffic(engine, seed, drafts, pace=[300, 3_000, 30_000][seed % 3]).run(1500)
        engine.offload.check_integrity()


# -- a broken engine is caught ----------------------------------------------------------------------------------------


def provoke(host: int = 40, pace: int = 600) -> None:
    """Enough traffic, over links slow enough, to fall into any of the traps below."""
    for seed in range(12):
        engine = TieredEngine(pool_for([FULL]), [FULL], tiers(host, 100))
        TieredTraffic(engine, seed, pace=pace).run(300)


@pytest.mark.parametrize(("host", "pace"), [(5, 1_000), (40, 600)])
def test_the_traps_are_traps_only_for_the_broken(host: int, pace: int) -> None:
    provoke(host, pace)


def loose(pool: Pool, held: BlockTable) -> BlockTable:
    """Let go of ``held`` now, and return what still knows its blocks."""
    ghost = BlockTable()
    for extent in held:
        ghost.append(Extent(list(extent.ids), extent.start))
    pool.holds.end(held)
    return ghost


@pytest.fixture
def forgiving(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that doesn't mind being given back what isn't held."""
    end = Holds.end

    def end_if_held(self: Holds, held: BlockTable) -> None:
        if held in self.tables:
            end(self, held)

    monkeypatch.setattr(Holds, "end", end_if_held)


@pytest.mark.source
@pytest.mark.usefixtures("forgiving")
def test_a_source_that_is_given_up_before_the_copy_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Storer.send

    def hasty(
        self: Storer, level: int, batches: Any, near: list[list[BlockTable]], *arguments: Any, **options: Any
    ) -> None:
        pool = self.state.tiers[level - 1].store.pool if level else self.state.layout.pool
        send(self, level, batches, [[loose(pool, held) for held in tables] for tables in near], *arguments, **options)

    monkeypatch.setattr(Storer, "send", hasty)
    with pytest.raises(Corrupted, match=r"page .* holds"):
        provoke()


@pytest.mark.source
@pytest.mark.usefixtures("forgiving")
def test_a_destination_that_is_used_before_the_copy_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    hold_slots = PageLayout.hold_slots
    monkeypatch.setattr(PageLayout, "hold_slots", lambda self, *a: loose(self.pool, hold_slots(self, *a)))
    with pytest.raises(Corrupted, match="reads"):
        provoke()


@pytest.mark.source
def test_a_store_that_is_found_before_it_has_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve, land = TierStore.reserve, TierStore.land

    def hasty(self: TierStore, pieces: Any, use: Any = None, behind: Any = None) -> Any:
        tables = reserve(self, pieces, use, behind)
        for piece, held in zip(pieces, tables or (), strict=False):
            land(self, piece, held, keep=True)
        return tables

    def landed(self: TierStore, piece: Any, held: BlockTable, keep: bool = False, use: Any = None) -> None:
        if not keep:
            self.pool.holds.end(held)

    monkeypatch.setattr(TierStore, "reserve", hasty)
    monkeypatch.setattr(TierStore, "land", landed)
    with pytest.raises(Corrupted, match=r"page .* holds None"):
        provoke()


@pytest.mark.source
@pytest.mark.usefixtures("forgiving")
def test_a_page_that_is_evicted_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    hold = TierStore.hold
    monkeypatch.setattr(TierStore, "hold", lambda self, *a: loose(self.pool, hold(self, *a)))
    with pytest.raises(Corrupted):
        provoke(host=5, pace=1_000)
