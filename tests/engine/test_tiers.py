"""Lower tiers under the engine: the sixth micro-scenario, plans against single steps, and the seed's review points."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.engine.driving import Row, replay
from tests.engine.test_plans import configs, same, workloads

from kvyard.engine.config import EngineConfig
from kvyard.tiers import OffloadConfig, TierConfig
from kvyard.tiers.links import LaneConfig, LinkConfig


def link(gbps: float, discipline: str = "fair", latency: int = 0) -> LinkConfig:
    lane = LaneConfig(bandwidth=int(gbps * 1e9), first_byte_ns=latency)
    return LinkConfig(discipline=discipline, outward=lane, inward=lane)


def host(blocks: int, gbps: float = 32, **options) -> OffloadConfig:
    return OffloadConfig(host=TierConfig(num_blocks=blocks, link=link(gbps)), **options)


POLICIES = [
    {},
    {"policy": "write_through_generated"},
    {"policy": "after_hits", "min_uses": 2},
    {"policy": "on_eviction", "offload_ahead": 8},
    {"policy": "on_eviction", "offload_ahead": 4, "on_unclean": "drop"},
    {"blocks_per_chunk": 2},
    {"offload_batch_size": 4},
    {"last_block": "recompute-block"},
    {"last_block": "recompute-token"},
]


@pytest.mark.parametrize("plans", [True, False], ids=["plans", "single steps"])
def test_the_third_request_finds_four_blocks_on_the_device_and_the_rest_on_the_host(plans):
    """The sixth micro-scenario: 12 blocks of 8 MiB over 32 GB/s, then a prefill of 64 tokens."""
    tiers = OffloadConfig(
        host=TierConfig(num_blocks=1000, link=link(32, "fifo")),
        last_block="recompute-block",  # as the peer does
    )
    config = EngineConfig(num_gpu_blocks=20, block_size=64, bytes_per_block=8 << 20, tiers=tiers)
    start = 2_000_000_000
    rows = [Row(0, 1024, 1, (1, 2)), Row(10**9, 1024, 1, (1000, 1001)), Row(start, 1024, 1, (1, 2))]
    log = replay(config, rows, plans=plans)
    assert log.of("admitted")[2] == ("r2", start + 3_145_728, 256, 704)
    assert log.of("produced")[2] == ("r2", 1, start + 20_620_613)
    vllm = replay(replace(config, tiers=replace(tiers, last_block="recompute-token")), rows, plans=plans)
    assert vllm.of("admitted")[2] == ("r2", start + 3_145_728, 256, 767)
    skipped = replay(replace(config, tiers=replace(tiers, last_block="skip")), rows, plans=plans)
    assert skipped.of("admitted")[2] == ("r2", start + 11 * (8 << 20) * 10**9 // (32 * 10**9), 256, 704)


@st.composite
def tiered(draw):
    config = draw(configs())
    options = draw(st.sampled_from(POLICIES))
    if "blocks_per_chunk" in options and any(spec.is_state for spec in config.specs):
        options = {}
    gbps = draw(st.sampled_from([0.02, 0.5, 32]))
    tiers = host(draw(st.sampled_from([20, 80, 400])), gbps, **options)
    if draw(st.booleans()) and options.get("policy") != "on_eviction":
        tiers = replace(tiers, storage=TierConfig(num_blocks=300, link=link(0.1, "fifo", 100_000)))
    return replace(config, tiers=tiers, bytes_per_block=1 << 16)


@given(tiered(), workloads())
@settings(max_examples=40)
def test_plans_are_single_steps(config, work):
    same(config, *work)
