"""Jobs that wait for lower tiers: the sixth micro-scenario, plans against single steps, blocks that must be copied first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.engine.driving import Log, Row, drive, link, replay
from tests.engine.test_core_plans import configs, same, workloads

from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job, JobState
from kvyard.engine.load_source import NO_HELP, NO_ROOM
from kvyard.engine.loads import Loads
from kvyard.engine.timing import FixedTiming
from kvyard.events.tier import Tier
from kvyard.hashing import TraceChain
from kvyard.tiers import OffloadConfig, TierConfig


def host(blocks: int, gbps: float = 32, **options) -> OffloadConfig:
    return OffloadConfig(tiers=(TierConfig(num_blocks=blocks, link=link(gbps)),), **options)


POLICIES = [
    {},
    {"policy": "write_through_generated"},
    {"policy": "after_hits", "min_uses": 2},
    {"policy": "on_eviction", "offload_ahead": 8},
    {"policy": "on_eviction", "offload_ahead": 4, "on_unclean": "drop"},
    {"policy": "lazy"},
    {"policy": "exclusive", "offload_ahead": 4},
    {"blocks_per_chunk": 2},
    {"offload_batch_size": 4},
    {"last_block": "recompute-block"},
    {"last_block": "recompute-token"},
    {"load_policy": "threshold", "load_options": {"tokens": 100, "in_flight": 2}},
    {"load_policy": "least-time"},
    {"wait_for_save": True},
    {"wait_for_save": True, "offload_batch_size": 4},
    {"wait_for_save": True, "policy": "lazy"},
    {"wait_for_save": True, "policy": "on_eviction", "offload_ahead": 8},
]


@pytest.mark.parametrize("plans", [True, False], ids=["plans", "single steps"])
def test_the_third_request_finds_four_blocks_on_the_device_and_the_rest_on_the_host(plans):
    """The sixth micro-scenario: 12 blocks of 8 MiB over 32 GB/s, then a prefill of 64 tokens."""
    tiers = OffloadConfig(
        tiers=(TierConfig(num_blocks=1000, link=link(32, "fifo")),),
        last_block="recompute-block",  # as the peer does
    )
    config = EngineConfig(num_gpu_blocks=20, block_size=64, bytes_per_block=8 << 20, tiers=tiers)
    start = 2_000_000_000
    rows = [Row(0, 1024, 1, (1, 2)), Row(10**9, 1024, 1, (1000, 1001)), Row(start, 1024, 1, (1, 2))]
    log = replay(config, rows, plans=plans)
    assert log.of("admitted")[2] == ("r2", start + 3_145_728, 256, 704)
    assert log.of("produced")[2] == ("r2", 1, start + 20_620_613)
    vllm = replay(replace(config, tiers=replace(tiers, last_block="recompute-token")), rows, plans=plans)
    assert vllm.of("admitted")[2] == ("r2", start + 3_145_728, 256, 767)
    skipped = replay(replace(config, tiers=replace(tiers, last_block="skip")), rows, plans=plans)
    assert skipped.of("admitted")[2] == ("r2", start + 11 * (8 << 20) * 10**9 // (32 * 10**9), 256, 704)


def test_without_caching_on_the_device_all_that_is_found_is_on_the_host():
    config = EngineConfig(
        num_gpu_blocks=200, block_size=64, bytes_per_block=8 << 20, tiers=host(1000), enable_prefix_caching=False
    )
    log = replay(config, [Row(at * 10**9, 1024, 1, (1, 2)) for at in range(3)])
    assert [found[2:] for found in log.of("admitted")] == [(0, 0), (0, 960), (0, 960)]
    announced = {event["tier"] for _, events, *_ in log.events for event in events}
    assert announced == {Tier.G2}, "nothing is cached on the device for others to know"


@st.composite
def tiered(draw):
    config = draw(configs())
    options = draw(st.sampled_from(POLICIES))
    if "blocks_per_chunk" in options and any(spec.is_state for spec in config.specs):
        options = {}
    gbps = draw(st.sampled_from([0.02, 0.5, 32]))
    tiers = host(draw(st.sampled_from([20, 80, 400])), gbps, **options)
    if draw(st.booleans()) and options.get("policy") != "on_eviction":
        storage = TierConfig(num_blocks=300, link=link(0.1, "fifo", 100_000))
        lower = draw(st.sampled_from([(storage,), (storage, TierConfig(num_blocks=900, link=link(0.05)))]))
        tiers = replace(tiers, tiers=(*tiers.tiers, *lower))
    on_device = draw(st.sampled_from([True, True, False]))
    return replace(config, tiers=tiers, bytes_per_block=1 << 16, enable_prefix_caching=on_device)


@given(tiered(), workloads())
@settings(max_examples=25)
def test_plans_are_single_steps(config, work):
    same(config, *work)


# -- on eviction ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_unclean", ["wait", "drop"])
def test_adopted_blocks_are_not_taken_again(on_unclean):
    """Nearly all of the prompt is on the device: one block is new, and there is one without a name."""
    tiers = host(200, 1, policy="on_eviction", offload_ahead=1, on_unclean=on_unclean)
    config = EngineConfig(num_gpu_blocks=63, block_size=16, bytes_per_block=64 << 20, tiers=tiers)
    second = 10**9
    rows = [Row(0, 320, 2, (2,)), Row(second, 640, 2, (1, 11)), Row(2 * second, 640, 2, (1, 11))]
    log = Log()
    core = make_core(config, watcher=log)
    drive(core, rows)
    assert log.of("admitted")[2] == ("r2", 2 * second, 624, 0)
    assert core.offload.counters.unclean_waits == core.offload.counters.dropped_blocks == 0


def test_blocks_for_a_load_must_be_clean_too():
    """The third prompt is in the host, and its blocks on the device are those of the second, which nobody has copied."""
    tiers = host(200, 1, policy="on_eviction", offload_ahead=1)
    config = EngineConfig(num_gpu_blocks=41, block_size=16, bytes_per_block=1 << 20, tiers=tiers)
    second = 10**9
    rows = [Row(at * second, 640, 1, (family, 10 + family)) for at, family in enumerate((1, 2, 1, 2))]
    log = Log()
    core = make_core(config, watcher=log)
    drive(core, rows)
    assert [entry[2:] for entry in log.of("admitted")] == [(0, 0), (0, 0), (16, 608), (16, 608)]
    assert core.offload.counters.dropped_blocks == 0


def test_waiting_for_storage_is_waiting_for_a_load():
    tiers = OffloadConfig(tiers=(TierConfig(num_blocks=60, link=link(20)), TierConfig(num_blocks=400, link=link(1))))
    config = EngineConfig(num_gpu_blocks=50, block_size=16, bytes_per_block=8 << 20, tiers=tiers)
    second = 10**9
    rows = [Row(2 * at * second, 640, 2, (family, 10 + family)) for at, family in enumerate((1, 2, 3, 1))]
    told = [entry for entry in replay(config, rows).of("loading") if entry[0] == "r3"]
    assert told[0] == ("r3", 6 * second, 0)  # it asks for what only storage has
    assert told[-1][2] == 624 and told[-1][1] > told[0][1]


# -- one job at a time -------------------------------------------------------------------------------------------------

MS = 1_000_000
ROOMY = EngineConfig(
    num_gpu_blocks=41,
    block_size=16,
    bytes_per_block=1 << 20,
    tiers=host(200, 1),
    timing=FixedTiming(prefill_ms=10, decode_ms=1),
)


def prompt(name: str, family: int, output: int = 1) -> Job:
    return Job(name, TraceChain((family, 10 + family), 512, 640, 16, ord(name)), output)


def with_two_stored():
    """An engine whose host has two prompts; of the first, a block is left on the device."""
    core = make_core(ROOMY)
    drive(core, [Row(0, 640, 1, (1, 11)), Row(10**9, 640, 1, (2, 12))])
    jobs = core.scheduler.jobs
    assert isinstance(jobs.loads, Loads) and not jobs.parked
    return core, jobs


def test_a_job_is_parked_until_its_blocks_have_landed():
    core, jobs = with_two_stored()
    now, job = 2 * 10**9, prompt("a", 1)
    core.submit(job, now)
    assert not core.begin(now)
    assert jobs.parked == {"a": job} and job.state is JobState.LOADING and not core.scheduler.waiting
    landed = core.next_decision()
    assert landed is not None and landed > now
    core.begin(landed)
    assert not jobs.parked and job.state is JobState.PREFILL
    assert job.external_tokens == 640 - 16 - job.cached_tokens


def test_a_request_waiting_for_the_same_blocks_asks_again_when_they_land():
    core, jobs = with_two_stored()
    now, first, second = 2 * 10**9, prompt("a", 1), prompt("b", 1)
    core.submit(first, now)
    core.submit(second, now)
    core.begin(now)
    assert set(jobs.parked) == {"a", "b"}
    landed = core.next_decision()
    core.begin(landed)
    assert not jobs.parked and list(core.scheduler.running.values()) == [first, second]
    assert (second.cached_tokens, second.external_tokens) == (624, 0), "what came for the other one is here now"


def test_without_room_it_waits_for_those_that_run_and_computes_when_nothing_does():
    core, jobs = with_two_stored()
    job = prompt("a", 1)
    taken = core.scheduler.manager.pool.take(30)
    hit = core.scheduler.manager.lookup(job)
    assert jobs.loads.ask(job, hit, 0, True, 0) == NO_ROOM
    assert jobs.loads.ask(job, hit, 0, False, 0) == NO_HELP
    assert not jobs.parked and taken


def test_a_job_that_gave_its_loaded_blocks_back_may_be_barred():
    core, jobs = with_two_stored()
    now, job = 2 * 10**9, prompt("a", 1)
    core.submit(job, now)
    core.begin(now)
    core.cancel(job, now)
    assert not jobs.parked
    again = prompt("b", 1)
    jobs.loads.preempted(again, now, bar=True)
    assert jobs.loads.ask(again, core.scheduler.manager.lookup(again), now, False, 0) == NO_HELP
