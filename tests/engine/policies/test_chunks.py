"""Where prompts are cut that have aligned states: at ends of blocks, and at the last one that another request could continue
from."""

from __future__ import annotations

import pytest

from kvyard.blocks import GroupSpec
from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job
from kvyard.engine.policies.chunks import ChunkSizes
from kvyard.hashing import TraceChain

GROUPS = (GroupSpec(kind="mamba", mode="align", block_size=16), GroupSpec(block_size=16))


@pytest.mark.parametrize(
    ("tokens", "past", "budget", "chunk"),
    [
        (64, 0, 1000, 48),  # the last token of a prompt is never a hit: the block before its end is the last of use
        (64, 48, 1000, 16),
        (65, 0, 1000, 64),
        (65, 64, 1000, 1),
        (70, 0, 1000, 64),
        (64, 0, 40, 32),  # the budget is cut down to whole blocks
        (64, 32, 40, 16),
        (16, 0, 100, 16),
        (17, 0, 100, 16),
    ],
)
def test_chunks_end_where_a_state_is_of_use(tokens: int, past: int, budget: int, chunk: int) -> None:
    config = EngineConfig(num_gpu_blocks=100, groups=GROUPS)
    sizes = ChunkSizes(config, make_core(config).scheduler.manager.geometry, always=False)
    sizes.begin_pass(1)
    job = Job("a", TraceChain(range(10), 16, tokens, 16, 1), 1)
    assert sizes.cut(job, past, budget) == chunk
