"""The host's part of a pass."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.engine.timing.deployment import Deployment
from kvyard.engine.timing.host import HOSTS, Host
from kvyard.engine.timing.roofline_timing import RooflineTiming
from kvyard.replay.run import replay as run_replay
from kvyard.replay.traces import TraceRequest


def test_without_overlap_the_host_adds_to_the_card() -> None:
    host = Host(step_us=1000.0, sequence_us=10.0, exposed_us=300.0)
    assert host.joined(64, 5000.0) == 5000.0 + 1000.0 + 640.0


def test_with_overlap_the_longer_of_the_two_counts() -> None:
    host = Host(step_us=1000.0, sequence_us=10.0, exposed_us=300.0, exposed_sequence_us=1.0, overlap=True)
    assert host.joined(64, 5000.0) == 5000.0 + 300.0 + 64.0
    assert host.joined(64, 800.0) == 1000.0 + 640.0


@pytest.mark.parametrize("engine", HOSTS)
@given(card_us=st.floats(0, 1e6), sequences=st.integers(1, 1024), overlap=st.booleans())
def test_many_passes_are_joined_as_one_is(engine: str, card_us: float, sequences: int, overlap: bool) -> None:
    timing = RooflineTiming(deployment=Deployment(model="llama-3.1-8b", gpu="h100"), engine=engine, overlap=overlap)
    host = timing.host()
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


def test_a_host_of_ones_own_is_added_whatever_overlaps() -> None:
    deployment = Deployment(model="llama-3.1-8b", gpu="h100")
    for overlap in (True, False):
        timing = RooflineTiming(deployment=deployment, host_us=700.0, overlap=overlap)
        assert timing.host() == Host(step_us=700.0)


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
