"""A pass that waits for its stores: what that costs, to the nanosecond, and whom."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from msgspec.structs import replace
from tests.engine.driving import Log, Row, link, replay
from tests.engine.test_core_plans import configs, workloads

from kvyard.blocks.spec import ConfigError
from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig, SpeculativeConfig
from kvyard.engine.job import Job
from kvyard.engine.timing import FixedTiming
from kvyard.hashing import TraceChain
from kvyard.tiers import OffloadConfig, TierConfig

BLOCK = 8 << 20
GBPS = 32
MS = 1_000_000


def ns(blocks: int) -> int:
    """Nanoseconds that ``blocks`` take to the host."""
    return blocks * BLOCK // GBPS


def engine(blocks: int = 1000, **tiers) -> EngineConfig:
    host = TierConfig(num_blocks=blocks, link=link(GBPS, "fifo"))
    return EngineConfig(
        num_gpu_blocks=200,
        block_size=64,
        bytes_per_block=BLOCK,
        tiers=OffloadConfig(tiers=(host,), **tiers),
        timing=FixedTiming(prefill_ms=18, decode_ms=1),
    )


def firsts(log: Log) -> dict[str, int]:
    """The time of each request's first token."""
    times: dict[str, int] = {}
    for name, _, end in log.of("produced"):
        times.setdefault(name, end)
    return times


def test_a_first_token_waits_for_its_own_blocks_alone() -> None:
    """Ten blocks are computed in 18 ms and stored in 2.6 ms. What comes after them stores nothing, and doesn't wait."""
    rows = [Row(0, 650, 4, (1, 2))]
    plain, waits = replay(engine(), rows), replay(engine(wait_for_save=True), rows)
    assert firsts(plain) == {"r0": 18 * MS}
    assert firsts(waits) == {"r0": 18 * MS + ns(10)}
    assert waits.of("ended")[0][1] == 18 * MS + ns(10) + 3 * MS


@pytest.mark.parametrize("chunk", [1, 4])
def test_batches_of_a_store_are_waited_for_one_after_the_other(chunk: int) -> None:
    config = engine(wait_for_save=True, offload_batch_size=chunk)
    assert firsts(replay(config, [Row(0, 640, 1, (1, 2))])) == {"r0": 18 * MS + ns(10)}


def test_each_chunk_waits_for_its_blocks() -> None:
    config = replace(engine(wait_for_save=True), max_num_batched_tokens=256)
    log = replay(config, [Row(0, 640, 1, (1, 2))])
    assert [(start, end) for start, end, *_ in log.passes] == [
        (0, 18 * MS + ns(4)),
        (18 * MS + ns(4), 36 * MS + ns(8)),
        (36 * MS + ns(8), 54 * MS + ns(10)),
    ]


def test_those_that_decode_wait_too_and_what_the_host_has_costs_nothing() -> None:
    """The second prompt comes while the first decodes, which has to wait for it; the third is stored already."""
    rows = [Row(0, 128, 40, (1, 2)), Row(18 * MS + ns(2), 640, 1, (7, 8)), Row(400 * MS, 640, 1, (7, 8))]
    log = replay(engine(wait_for_save=True), rows)
    start, end = log.passes[1][:2]
    assert (start, end) == (18 * MS + ns(2), 37 * MS + ns(12))  # 18 ms for the prompt, 1 for a token, and the store
    assert log.passes[1][3] == 1  # one decodes in it
    assert firsts(log)["r2"] == 418 * MS


@given(configs(models=("full", "window")), workloads())
@settings(max_examples=30)
def test_no_pass_begins_before_the_stores_of_the_one_before_have_left(config, work) -> None:
    rows, _ = work
    host = TierConfig(num_blocks=80, link=link(0.5))
    config = replace(config, tiers=OffloadConfig(tiers=(host,), wait_for_save=True), bytes_per_block=1 << 16)
    core = make_core(config)
    offload = core.offload
    assert offload is not None
    jobs = [
        (row.arrival, Job(f"r{at}", TraceChain(row.ids, 512, row.length, 16, at), row.output, arrival=row.arrival))
        for at, row in enumerate(rows)
    ]
    while True:
        due = [when for when in (core.next_decision(), jobs[0][0] if jobs else None) if when is not None]
        if not due:
            break
        now = min(due)
        was_busy = core.busy
        core.advance(now)
        fresh = was_busy and not core.busy
        while jobs and jobs[0][0] == now:
            core.submit(jobs.pop(0)[1], now)
        if fresh:
            assert not offload.saving, f"a pass ended at {now} before its stores had left"
        core.begin(now)
        core.check_integrity()
    assert not offload.saving


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="stores of prompts"):
        OffloadConfig(tiers=(TierConfig(num_blocks=9),), policy="write_through_generated", wait_for_save=True)
    with pytest.raises(ConfigError, match="make the host private"):
        OffloadConfig(tiers=(TierConfig(num_blocks=9, scope="shared"),), wait_for_save=True)
    drafts = SpeculativeConfig(num_speculative_tokens=1, acceptance_rates=(0.5,))
    with pytest.raises(ConfigError, match="not modelled with draft tokens"):
        make_core(replace(engine(wait_for_save=True), speculative=drafts))
    with pytest.raises(ConfigError, match="leave out data-parallel ranks"):
        make_core(engine(wait_for_save=True), ranks=2)
