"""The TensorRT-LLM policy: what gets in runs to its end."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.engine.driving import Row, drive, replay

from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.engine.policies.settings import TrtllmSettings

SMALL = EngineConfig(backend="trtllm", block_size=16, num_gpu_blocks=20)


def test_the_output_is_reserved_before_it_is_produced():
    rows = [Row(0, 100, 100, (1,)), Row(0, 100, 100, (2,))]  # 13 of 20 blocks each, though a prompt takes 7
    log = replay(SMALL, rows)
    first_ends = next(now for name, now, *_ in log.of("ended") if name == "r0")
    assert [now for _, now, *_ in log.of("admitted")] == [0, first_ends]
    # vLLM lets both in, and then has to push one out.
    vllm = replay(EngineConfig(block_size=16, num_gpu_blocks=20), rows)
    assert [now for _, now, *_ in vllm.of("admitted")][:2] == [0, 0] and vllm.of("preempted")


def test_held_blocks_need_not_be_reserved_again():
    shared = [Row(0, 161, 60, (1,)), Row(50_000_000, 161, 60, (1,))]  # 14 blocks each, 10 of them the same
    log = replay(SMALL, shared)
    admitted = {name: (now, cached) for name, now, cached, _ in log.of("admitted")}
    assert admitted["r1"][1] == 160
    assert admitted["r1"][0] < next(now for name, now, *_ in log.of("ended") if name == "r0")


def test_cached_blocks_without_a_holder_must_be_reserved():
    rows = [Row(0, 161, 60, (1,)), Row(10**9, 100, 200, (2,)), Row(1_050_000_000, 161, 60, (1,))]
    log = replay(SMALL, rows)
    # r0 has ended and its prefix is cached, but r1 has reserved 19 blocks: the cached ones are among its room.
    admitted = {name: now for name, now, *_ in log.of("admitted")}
    assert admitted["r2"] == next(now for name, now, *_ in log.of("ended") if name == "r1")


def test_output_is_cut_to_the_pool():
    jobs = drive(make_core(SMALL), [Row(0, 100, 5000, (1,))])
    assert jobs[0].output == 20 * 16 - 100


def test_a_prompt_without_room_for_an_answer_is_turned_away():
    log = replay(SMALL, [Row(0, 320, 1, (1,))])
    assert log.of("ended") == [
        ("r0", 0, "REJECTED", 0, "its prompt of 320 tokens leaves no room in the 20 blocks there are")
    ]


def test_preempting_is_a_fault_by_the_mockers_rules():
    core = make_core(replace(SMALL, trtllm=TrtllmSettings(mocker=True)))
    with pytest.raises(AssertionError, match="guaranteed not to happen"):
        core.scheduler.policy._victim(core.scheduler.running)
