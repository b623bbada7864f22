"""Plans and single steps are the same engine under the other policies too, and nobody is left behind."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.driving import Log, Row, replay
from tests.engine.test_core_plans import same, workloads

from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job
from kvyard.engine.policies.settings import SglangSettings, TrtllmSettings
from kvyard.engine.timing import FixedTiming, PolynomialTiming
from kvyard.hashing import TokenChain, algorithm

TIMINGS = [PolynomialTiming(), FixedTiming(prefill_ms=18, decode_ms=1)]


@st.composite
def no_evict(draw):
    return EngineConfig(
        backend="trtllm",
        block_size=16,
        num_gpu_blocks=draw(st.sampled_from([40, 70, 130, 1000])),
        max_num_seqs=draw(st.sampled_from([2, 4, 64])),
        max_num_batched_tokens=draw(st.sampled_from([64, 256, 8192])),
        max_model_len=draw(st.sampled_from([None, 800])),
        timing=draw(st.sampled_from(TIMINGS)),
        trtllm=draw(
            st.builds(
                TrtllmSettings,
                capacity_scheduler_policy=st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
                enable_chunked_prefill=st.booleans(),
                context_chunking_policy=st.sampled_from(["first_come_first_served", "equal_progress"]),
                chunk_unit_size=st.sampled_from([None, 64]),
                batch_wait_timeout_iters=st.sampled_from([0, 3]),
                batch_wait_max_tokens_ratio=st.sampled_from([0.0, 0.5]),
                mocker=st.booleans(),
            )
        ),
    )


@st.composite
def sglang(draw):
    page = draw(st.sampled_from([1, 16, 16]))
    chunk = draw(st.sampled_from([64, 256, 8192]))
    return EngineConfig(
        backend="sglang",
        block_size=page,
        num_gpu_blocks=draw(st.sampled_from([40, 70, 130, 1000])) * 16 // page,
        max_num_seqs=draw(st.sampled_from([2, 4, 64])),
        enable_prefix_caching=draw(st.sampled_from([True, True, True, False])),
        max_model_len=draw(st.sampled_from([None, 800])),
        sglang=SglangSettings(
            schedule_policy=draw(st.sampled_from(["fifo", "lpm"])),
            chunked_prefill_size=chunk,
            max_prefill_tokens=chunk * draw(st.integers(1, 2)),
            clip_max_new_tokens=draw(st.sampled_from([10, 4096])),
            schedule_conservativeness=draw(st.sampled_from([0.0, 0.1, 1.0])),
            books_sampled=draw(st.booleans()),
        ),
        timing=draw(st.sampled_from(TIMINGS)),
    )


def same_in_bulk(config, rows, looks):
    """Blocks of many passes taken at once: events come out later, and nothing else changes."""
    taken, stepped = replay(config, rows, looks, bulk=True), replay(config, rows, plans=False)
    assert taken.passes == stepped.passes
    assert taken.jobs == stepped.jobs


@given(no_evict(), workloads())
def test_no_evict(config, work):
    same(config, *work)


def test_a_prompt_that_fits_no_pass_is_rejected_in_the_next_one():
    """Also behind others that wait, in the middle of a plan."""
    config = EngineConfig(
        backend="trtllm",
        num_gpu_blocks=40,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        trtllm=TrtllmSettings(enable_chunked_prefill=False),
    )
    rows = [Row(0, 1, 9, (0, at)) for at in range(3)] + [Row(18_000_000, 65, 1, (0, 9))]
    planned = replay(config, rows)
    assert planned.jobs == replay(config, rows, plans=False).jobs
    assert ("r3", "REJECTED") in {(job[1], job[3]) for job in planned.jobs if job[0] == "ended"}


@given(st.one_of(no_evict(), sglang()), workloads())
@settings(max_examples=25)
def test_in_bulk(config, work):
    same_in_bulk(config, *work)


@given(sglang(), workloads())
def test_sglang(config, work):
    same(config, *work)


@pytest.mark.parametrize("policy", ["fifo", "lpm"])
@pytest.mark.parametrize("page", [1, 16])
def test_retraction_is_the_rule_here(policy, page):
    rows = [Row(at * 3_000_000, 200 + at * 7, 150, (at % 3, 100 + at), cancel=None) for at in range(12)]
    config = EngineConfig(
        backend="sglang",
        block_size=page,
        num_gpu_blocks=40 * 16 // page,
        max_num_seqs=8,
        sglang=SglangSettings(schedule_policy=policy, schedule_conservativeness=0.0, clip_max_new_tokens=1),
    )
    planned, stepped = replay(config, rows), replay(config, rows, plans=False)
    assert planned.of("preempted")
    assert (planned.passes, planned.jobs, planned.events) == (stepped.passes, stepped.jobs, stepped.events)


def run(core, jobs):
    coming = list(reversed(jobs))
    while coming or core.next_decision() is not None:
        due = [core.next_decision(), coming[-1].arrival if coming else None]
        now = min(when for when in due if when is not None)
        core.advance(now)
        while coming and coming[-1].arrival == now:
            core.submit(coming.pop(), now)
        core.begin(now)
        core.check_integrity()


@pytest.mark.parametrize(("backend", "policy"), [("trtllm", ""), ("sglang", "fifo"), ("sglang", "lpm")])
def test_with_real_tokens(backend, policy):
    """Generated blocks can be hit here, so a decode step may help who waits."""
    settings = SglangSettings(schedule_policy=policy, chunked_prefill_size=256) if backend == "sglang" else None
    config = EngineConfig(backend=backend, block_size=16, num_gpu_blocks=60, sglang=settings)
    logs = []
    for plans in (True, False):
        log = Log()
        core = make_core(config, watcher=log, plans=plans)
        jobs = []
        for at in range(10):
            prompt = [at % 3] * 200 + [7] * (at * 20)
            chain = TokenChain(prompt, 16, algorithm("sha256"))
            jobs.append(Job(f"r{at}", chain, 60, arrival=at * 40_000_000, sample=lambda low, high: [7] * (high - low)))
        run(core, jobs)
        logs.append(log)
    assert any(cached for *_, cached, _ in logs[0].of("admitted"))
    for kind in ("passes", "jobs"):
        assert getattr(logs[0], kind) == getattr(logs[1], kind)
