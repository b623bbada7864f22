"""The host's part of a pass."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.engine.timing.deployment import Deployment
from kvyard.engine.timing.host import HOSTS, Host
from kvyard.engine.timing.roofline_timing import Calibration, RooflineTiming
from kvyard.replay.run import replay as run_replay
from kvyard.replay.traces import TraceRequest


def test_without_overlap_the_host_adds_to_the_card() -> None:
    host = Host(step_us=1000.0, sequence_us=10.0, exposed_us=300.0)
    assert host.joined(64, 5000.0) == 5000.0 + 1000.0 + 640.0


def test_with_overlap_the_longer_of_the_two_counts() -> None:
    host = Host(step_us=1000.0, sequence_us=10.0, exposed_us=300.0, exposed_sequence_us=1.0, overlap=True)
    assert host.joined(64, 5000.0) == 5000.0 + 300.0 + 64.0
    assert host.joined(64, 800.0) == 1000.0 + 640.0
    launched = replace(host, launch_us=3000.0)
    assert launched.joined_prompts(64, 800.0) == 3000.0 + 300.0 + 64.0
    assert launched.joined_prompts(64, 5000.0) == host.joined(64, 5000.0)


@pytest.mark.parametrize("engine", HOSTS)
@given(card_us=st.floats(0, 1e6), sequences=st.integers(1, 1024), overlap=st.booleans())
def test_many_passes_are_joined_as_one_is(engine: str, card_us: float, sequences: int, overlap: bool) -> None:
    timing = RooflineTiming(deployment=Deployment(model="llama-3.1-8b", gpu="h100"), engine=engine, overlap=overlap)
    host = timing.host(timing.deployment.operators())
    assert host.joined_many(sequences, np.array([card_us])).tolist() == [host.joined(sequences, card_us)]
    assert host.joined(sequences + 1, card_us) >= host.joined(sequences, card_us)


@pytest.mark.parametrize("backend", ["vllm", "sglang", "trtllm"])
def test_engines_decide_ahead_by_default_and_their_host_overlaps(backend: str) -> None:
    timing = RooflineTiming(deployment=Deployment(model="llama-3.1-8b", gpu="h100"), engine=backend)
    ahead, behind = (
        make_core(EngineConfig(backend=backend, timing=timing, num_gpu_blocks=1000, async_scheduling=one))
        for one in (None, False)
    )
    assert ahead.ahead and not behind.ahead
    assert ahead.timing.pass_ns((), 128, 128_000, 1000) < behind.timing.pass_ns((), 128, 128_000, 1000)


def test_prompts_take_at_least_the_launches_of_their_kernels() -> None:
    """SGLang has no CUDA graphs for prompts: DeepSeek-V3's 61 layers take 82.6 ms, Llama 3 8B's 32 about 9."""
    vllm, sglang = (
        RooflineTiming(deployment=Deployment(model="llama-3.1-8b", gpu="h100"), engine=engine, overlap=True)
        for engine in ("vllm", "sglang")
    )
    short = [timing.model(1000).pass_ns([(16, 0)], 0, 0, 0) for timing in (vllm, sglang)]
    assert short[0] < 8_640_000 <= short[1] < 9_500_000
    decode = [timing.model(1000).pass_ns((), 16, 1600, 100) for timing in (vllm, sglang)]
    assert decode[1] < 1.2 * decode[0], "those of decode steps are graphs"
    long = [timing.model(1000).pass_ns([(8000, 0)], 0, 0, 0) for timing in (vllm, sglang)]
    assert long[1] < 1.2 * long[0], "launches are hidden behind kernels"
    mixture = RooflineTiming(
        deployment=Deployment(model="deepseek-v3", gpu="h200", tensor_parallel_size=8), engine="sglang"
    )
    assert 60e6 < mixture.model(1000).pass_ns([(1, 0)], 0, 0, 0) < 85e6


def test_launches_may_be_given_and_a_measured_prompt_bounds_them() -> None:
    timing = RooflineTiming(deployment=Deployment(model="llama-3.1-8b", gpu="h100"), engine="sglang", launch_us=50e3)
    host = timing.host(timing.deployment.operators())
    assert timing.model(1000).pass_ns([(16, 0)], 0, 0, 0) == round((50e3 + host.alone_us(1)) * 1e3)
    measured = replace(timing, calibration=Calibration(ttft_ms=20.0, prompt_tokens=16))
    assert measured.model(1000).pass_ns([(16, 0)], 0, 0, 0) == pytest.approx(20e6, rel=1e-6)


def test_a_host_of_ones_own_is_added_whatever_overlaps() -> None:
    deployment = Deployment(model="llama-3.1-8b", gpu="h100")
    for overlap in (True, False):
        timing = RooflineTiming(deployment=deployment, host_us=700.0, overlap=overlap)
        assert timing.host(deployment.operators()) == Host(step_us=700.0)


def test_the_front_end_takes_its_time_for_a_request_and_each_token_of_its_prompt() -> None:
    """AIBrix's plain stack: 50 ms to the first token of 21,073 cached ones, of which a pass on its A100 is about 15."""
    timing = RooflineTiming(deployment=Deployment(model="llama-3.1-8b", gpu="a100"))
    model = timing.model(1)
    assert 45e6 < timing.front_end_ns(21_073) + model.pass_ns([(33, 21_040)], 0, 0, 0) < 62e6
    assert replace(timing, front_end_us=500.0, front_end_token_us=2.0).front_end_ns(100) == 700_000


def test_clients_wait_for_the_front_end_and_the_engine_does_not() -> None:
    requests = [TraceRequest(str(at), at * 10**9, 1000, 20) for at in range(5)]
    settings = {"model": "llama-3.1-8b", "gpu": "h100", "workers": 1}
    plain, slow = (
        list(run_replay(requests, **settings, front_end_us=us, front_end_token_us=0.0).records) for us in (0.0, 9000.0)
    )
    for one, other in zip(plain, slow, strict=True):
        assert other.admitted == one.admitted
        assert other.first_token - one.first_token == other.ended - one.ended == 9_000_000


def test_a_slot_sends_the_next_request_when_the_client_has_seen_the_end() -> None:
    requests = [TraceRequest(str(at), 0, 1000, 20) for at in range(5)]
    settings = {"model": "llama-3.1-8b", "gpu": "h100", "workers": 1, "concurrency": 1, "turnaround": "3ms"}
    records = list(run_replay(requests, **settings, front_end_us=9000.0, front_end_token_us=0.0).records)
    assert [after.arrival - before.ended for before, after in pairwise(records)] == [3_000_000] * 4
