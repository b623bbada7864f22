"""Decoding with drafts: what holds is kept, the rest is taken back, and chance depends on the request alone."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.engine.driving import Row, replay

from kvyard.blocks import BlockManager, GroupSpec
from kvyard.engine.config import EngineConfig, SpeculativeConfig
from kvyard.engine.job import Job, JobState
from kvyard.engine.speculative import SpeculativeBatch
from kvyard.engine.timing import FixedTiming
from kvyard.hashing import TraceChain

SMALL = EngineConfig(block_size=16, num_gpu_blocks=64, timing=FixedTiming(prefill_ms=10, decode_ms=1))


@pytest.mark.parametrize(("rates", "kept"), [((1.0, 1.0, 0.0), 2), ((1.0, 0.0, 1.0), 1), ((0.0, 1.0, 1.0), 0)])
def test_a_draft_holds_only_if_all_before_it_do_and_the_rest_is_taken_back(rates, kept):
    manager = BlockManager(20, [GroupSpec(block_size=16)])
    batch = SpeculativeBatch(manager, rates, 0)
    job = Job("a", TraceChain((1,), 512, 20, 16, 0), 10)
    manager.allocate(job, 20)
    job.running, job.num_computed_tokens = True, 20
    job.emit(1)
    batch.join(job)
    assert job.state is JobState.DECODE and batch.tokens(job) == 4
    manager.allocate(job, 4, lookahead=3)
    assert batch.verify(job, 4) == kept + 1
    assert (job.num_computed_tokens, job.num_tokens, job.output) == (21 + kept, 22 + kept, 2 + kept)


def test_an_answer_gets_no_more_tokens_than_it_asked_for_though_more_drafts_hold():
    manager = BlockManager(20, [GroupSpec(block_size=16)], max_model_len=40)
    batch = SpeculativeBatch(manager, (1.0, 1.0, 1.0), 0)
    job = Job("a", TraceChain((1,), 512, 20, 16, 0), 3)
    manager.allocate(job, 20)
    job.running, job.num_computed_tokens = True, 20
    job.emit(1)
    batch.join(job)
    assert batch.tokens(job) == 4, "drafts are made whether they are of use or not"
    manager.allocate(job, 4)
    assert batch.verify(job, 4) == 2
    assert (job.num_computed_tokens, job.num_tokens, job.output) == (22, 23, 3)


@pytest.mark.parametrize(("prompt", "tokens"), [(35, 4), (36, 3), (37, 2), (38, 1)])
def test_no_draft_goes_beyond_the_length_of_the_model(prompt, tokens):
    manager = BlockManager(20, [GroupSpec(block_size=16)], max_model_len=40)
    batch = SpeculativeBatch(manager, (1.0, 1.0, 1.0), 0)
    job = Job("a", TraceChain((1,), 512, prompt, 16, 0), 10)
    job.emit(1)
    assert batch.tokens(job) == tokens


def test_drafts_make_bursts():
    config = replace(SMALL, speculative=SpeculativeConfig(num_speculative_tokens=2, acceptance_rates=(1.0, 1.0)))
    log = replay(config, [Row(0, 20, 8, (1,))])
    assert [count for _, count, _ in log.of("produced")] == [1, 3, 3, 1]
    config = replace(config, speculative=SpeculativeConfig(num_speculative_tokens=2, acceptance_rates=(0.0, 0.0)))
    assert [count for _, count, _ in replay(config, [Row(0, 20, 4, (1,))]).of("produced")] == [1, 1, 1, 1]


def test_draws_depend_on_the_request_and_the_seed_only():
    config = replace(SMALL, speculative=SpeculativeConfig(num_speculative_tokens=3, acceptance_rates=(0.6, 0.6, 0.6)))
    rows = [Row(0, 20, 40, (1,)), Row(0, 20, 40, (2,))]

    def bursts(config, rows):
        log = replay(config, rows)
        return [count for name, count, _ in log.of("produced") if name == "r0"]

    assert bursts(config, rows) == bursts(config, rows[:1])
    assert bursts(config, rows) != bursts(replace(config, seed=1), rows)
