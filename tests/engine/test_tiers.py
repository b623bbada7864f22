"""Lower tiers under the engine: the sixth micro-scenario, plans against single steps, and the seed's review points."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.engine.test_plans import configs, same, workloads

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
]


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
