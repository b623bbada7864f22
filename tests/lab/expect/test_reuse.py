"""Sums of hits by reuse distances: those of a block manager, prompt by prompt, without one."""

from __future__ import annotations

from random import Random

import pytest
from tests.lab.expect.support import documents

from kvyard.engine.config import EngineConfig
from kvyard.lab.expect.reuse import Reuse
from kvyard.replay.report.plain_cache import PlainCache
from kvyard.replay.traces import TraceRequest

ASKED: list[TraceRequest] = Random(29).choices(documents(24, document=640, kinds=24), k=200)


def found(blocks: int, size: int, places: int = 1) -> int:
    """Tokens that real block managers find, one for each place."""
    caches = [PlainCache(EngineConfig(block_size=size), blocks) for _ in range(places)]
    for at, row in enumerate(ASKED):
        caches[at % places].add(row, row.arrival)
    return sum(cache.found for cache in caches)


@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("tokens", [4_000, 8_000, 12_000, 100_000])
def test_pools_and_blocks_of_other_sizes(tokens: int, size: int) -> None:
    reuse = Reuse([(row, "one") for row in ASKED], 16)
    hits = found(tokens // size, size)
    assert reuse.hits(tokens // size, size) == pytest.approx(hits, rel=0.1)


def test_each_worker_has_a_cache_of_its_own() -> None:
    reuse = Reuse([(row, f"worker {at % 3}") for at, row in enumerate(ASKED)], 16)
    assert reuse.hits(500, 16) == pytest.approx(found(500, 16, places=3), rel=0.05)


def test_the_pool_of_a_share_of_the_hits() -> None:
    reuse = Reuse([(row, "one") for row in ASKED], 16)
    share = found(320, 16) / found(960, 16)
    assert reuse.blocks(share, 960, 16) == pytest.approx(320, rel=0.1)
    assert reuse.blocks(1.0, 960, 16) == pytest.approx(960, rel=0.1)
    assert Reuse([(ASKED[0], "one")], 16).blocks(0.5, 250, 16) == 125
