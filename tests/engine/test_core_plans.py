"""Plans and single steps are the same engine: equal records and equal events, whatever comes in at whatever instant."""

from __future__ import annotations

import pytest
from hypothesis import given, note
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.engine.driving import LongestTiming, Row, replay

from kvyard.blocks import GroupSpec
from kvyard.engine.config import EngineConfig, SpeculativeConfig
from kvyard.engine.timing import FixedTiming, PolynomialTiming

MODELS = {
    "full": (GroupSpec(kind="full", block_size=16),),
    "window": (GroupSpec(kind="full", block_size=16), GroupSpec(kind="sliding_window", block_size=16, window=64)),
    "state": (GroupSpec(kind="full", block_size=16), GroupSpec(kind="mamba", block_size=16)),
}


@st.composite
def workloads(draw):
    """Prompts that share prefixes, in bursts and apart, a few of them given up."""
    rows = []
    now = 0
    for at in range(draw(st.integers(1, 12))):
        now += draw(st.sampled_from([0, 0, 1, 999_999, 5_740_000, 18_000_000, 400_000_000]))
        length = draw(st.integers(1, 900))
        family = draw(st.integers(0, 2))
        # Ids are cumulative: the same family agrees on its first block and perhaps on the second.
        ids = tuple(
            (family * 10 + level if level == 0 or draw(st.booleans()) else 1000 + at * 10 + level) for level in range(2)
        )
        cancel = draw(st.none() | st.none() | st.integers(0, 200_000_000))
        rows.append(Row(now, length, draw(st.integers(1, 120)), ids, draw(st.integers(0, 2)), cancel))
    looks = draw(st.lists(st.integers(0, 1_000_000_000), max_size=6))
    return rows, looks


@st.composite
def configs(draw, models=tuple(MODELS)):
    model = draw(st.sampled_from(models))
    policy, mode = draw(st.sampled_from([("fcfs", "newest"), ("fcfs", "oldest"), ("priority", "newest")]))
    return EngineConfig(
        groups=MODELS[model],
        num_gpu_blocks=draw(st.sampled_from([70, 130, 200, 1000])),
        max_num_seqs=draw(st.sampled_from([2, 4, 64])),
        max_num_batched_tokens=draw(st.sampled_from([64, 256, 8192])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 48])),
        scheduling_policy=policy,
        preemption_mode=mode,
        scheduler_reserve_full_isl=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.05])),
        max_model_len=draw(st.sampled_from([None, 800])),
        timing=draw(st.sampled_from([PolynomialTiming(), FixedTiming(prefill_ms=18, decode_ms=1), LongestTiming()])),
    )


def same(config, rows, looks):
    note(f"{config!r}\n{rows!r}\n{looks!r}")
    planned = replay(config, rows, looks)
    stepped = replay(config, rows, plans=False)
    assert planned.passes == stepped.passes
    assert planned.jobs == stepped.jobs
    assert planned.events == stepped.events


@given(configs(), workloads())
def test_plans_are_single_steps(config, work):
    same(config, *work)


@given(configs(), workloads())
def test_passes_decided_ahead(config, work):
    same(replace(config, async_scheduling=True), *work)


@given(configs(models=("full", "window")), workloads(), st.integers(1, 3))
def test_with_drafts(config, work, length):
    config = replace(
        config,
        speculative=SpeculativeConfig(num_speculative_tokens=length, acceptance_rates=(0.7, 0.5, 0.3)),
        max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_num_seqs * (1 + length)),
    )
    same(config, *work)


@pytest.mark.parametrize("blocks", [40, 60])
def test_under_pressure(blocks):
    """Preemption is the rule here rather than the exception."""
    rows = [Row(at * 3_000_000, 200 + at * 7, 150, (at, 100 + at), cancel=None) for at in range(12)]
    config = EngineConfig(num_gpu_blocks=blocks, block_size=16, max_num_seqs=8, scheduler_reserve_full_isl=False)
    planned, stepped = replay(config, rows), replay(config, rows, plans=False)
    assert planned.of("preempted")
    assert (planned.passes, planned.jobs, planned.events) == (stepped.passes, stepped.jobs, stepped.events)
