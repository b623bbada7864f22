"""The horizon: for how many passes a decode batch stays as it is. Plans against single steps are in test_plans."""

from __future__ import annotations

from msgspec.structs import replace

from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig, SpeculativeConfig
from kvyard.engine.core import EngineCore
from kvyard.engine.horizon import Horizon
from kvyard.engine.job import Job
from kvyard.engine.passes import Pass
from kvyard.engine.timing import FixedTiming
from kvyard.hashing import TokenChain, TraceChain, algorithm

MS = 1_000_000
SMALL = EngineConfig(block_size=16, num_gpu_blocks=64, timing=FixedTiming(prefill_ms=10, decode_ms=1))


def traced(name: str, tokens: int, output: int) -> Job:
    return Job(name, TraceChain((ord(name),), 512, tokens, 16, ord(name)), output)


def tokened(name: str, tokens: int, output: int) -> Job:
    ids = list(range(1000 * ord(name), 1000 * ord(name) + tokens))
    return Job(name, TokenChain(ids, 16, algorithm("xxh3")), output, sample=lambda low, high: [7] * (high - low))


def after_prompts(config: EngineConfig, *jobs: Job) -> EngineCore:
    """An engine that has computed the prompts of ``jobs``, at 10 ms."""
    core = make_core(config)
    for job in jobs:
        core.submit(job, 0)
    core.begin(0)
    core.advance(10 * MS)
    return core


def formed(core: EngineCore, longest: int = 1000) -> Pass:
    made = core.scheduler.form(10 * MS, longest)
    assert made is not None and not made.chunks
    return made


def test_the_horizon_ends_with_the_first_last_token():
    core = after_prompts(SMALL, traced("a", 20, 9), traced("b", 20, 6))
    assert isinstance(core.scheduler.policy.horizon, Horizon)
    assert formed(core).stable_for == 5


def test_the_horizon_is_no_longer_than_asked_for():
    assert formed(after_prompts(SMALL, traced("a", 20, 9)), 3).stable_for == 3


def test_the_horizon_ends_before_blocks_may_run_out():
    made = formed(after_prompts(replace(SMALL, num_gpu_blocks=8), traced("a", 20, 90), traced("b", 20, 90)))
    assert made.stable_for == 16, "four blocks are free: one more each is certain"


def test_a_waiting_job_ends_it_where_a_block_may_be_of_its_prefix():
    config = replace(SMALL, num_gpu_blocks=8)
    # Of real tokens the block that ends with token 32 may be; of a trace each job names its own.
    for make, passes in ((tokened, 11), (traced, 64)):
        core = after_prompts(config, make("a", 20, 65))
        core.submit(make("b", 110, 5), 10 * MS)
        assert formed(core).stable_for == passes


def test_a_pass_with_a_prompt_is_not_repeated():
    core = after_prompts(SMALL, traced("a", 20, 9))
    core.submit(traced("b", 30, 9), 10 * MS)
    made = core.scheduler.form(10 * MS, 1000)
    assert made is not None and [new for _, new, _ in made.chunks] == [30] and made.stable_for == 1


def test_a_pass_that_preempted_is_not_repeated():
    core = after_prompts(replace(SMALL, num_gpu_blocks=4), traced("a", 32, 30), traced("b", 32, 30))
    made = formed(core)
    assert core.scheduler.jobs.preemptions == 1 and made.decoding == 1 and made.stable_for == 1


def test_drafts_are_worked_out_pass_by_pass():
    core = after_prompts(replace(SMALL, speculative=SpeculativeConfig(num_speculative_tokens=2)), traced("a", 20, 30))
    made = formed(core)
    assert [tokens for _, tokens in made.drafted] == [3] and made.stable_for == 1
