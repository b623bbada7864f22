"""Every eviction policy in an engine: plans are single steps, on the device and in lower tiers, and nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.engine.driving import Log, Row, drive, link
from tests.engine.test_core_plans import configs, workloads

from kvyard.blocks import ConfigError
from kvyard.blocks.eviction import ORDERS
from kvyard.blocks.use import RequestFacts
from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job
from kvyard.hashing import TraceChain
from kvyard.replay.facts import next_uses
from kvyard.replay.traces import TraceRequest
from kvyard.tiers import OffloadConfig, TierConfig

SECOND = 10**9
NAMES = [name for name in ORDERS.ours if name not in ("lru", "priority")]


def jobs_of(rows):
    """Jobs that know their future, their turn and a category."""
    trace = [
        TraceRequest(
            f"r{at}", row.arrival, row.length, row.output, ids=row.ids[: -(-row.length // 512)], id_block_size=512
        )
        for at, row in enumerate(rows)
    ]
    future = next_uses(trace, 16)

    def make(at: int, row: Row, size: int) -> Job:
        facts = RequestFacts(("chat", "api")[row.ids[0] % 2], row.priority, at, future[f"r{at}"])
        chain = TraceChain(row.ids, 512, row.length, size, at)
        return Job(f"r{at}", chain, row.output, arrival=row.arrival, priority=row.priority, facts=facts)

    return make


def run(config, rows, looks=(), plans=True):
    log = Log()
    core = make_core(config, watcher=log, events=True, plans=plans, foresight=True)
    drive(core, rows, looks, make_job=jobs_of(rows))
    return core, log


@given(st.sampled_from(NAMES), configs(), workloads(), st.booleans())
@settings(max_examples=6)
def test_plans_are_single_steps(name, config, work, ahead):
    planned_is_stepped(name, config, work, ahead)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@given(configs(), workloads(), st.booleans())
@settings(max_examples=100)
def test_plans_are_single_steps_for_each(name, config, work, ahead):
    planned_is_stepped(name, config, work, ahead)


def planned_is_stepped(name, config, work, ahead):
    rows, looks = work
    config = replace(config, eviction=name, num_gpu_blocks=70, async_scheduling=ahead)
    planned, stepped = run(config, rows, looks)[1], run(config, rows, plans=False)[1]
    assert (planned.passes, planned.jobs, planned.events) == (stepped.passes, stepped.jobs, stepped.events)


BELOW = [name for name in NAMES if name != "queue-informed"]
OFFLOADS = st.sampled_from([{}, {"policy": "on_eviction", "offload_ahead": 8}])


@given(st.sampled_from(BELOW), configs(), workloads(), OFFLOADS)
@settings(max_examples=6)
def test_plans_are_single_steps_with_lower_tiers(name, config, work, options):
    planned_is_stepped_below(name, config, work, options)


@pytest.mark.slow
@pytest.mark.parametrize("name", BELOW)
@given(configs(), workloads(), OFFLOADS)
@settings(max_examples=100)
def test_plans_are_single_steps_with_lower_tiers_for_each(name, config, work, options):
    planned_is_stepped_below(name, config, work, options)


def planned_is_stepped_below(name, config, work, options):
    rows, looks = work
    device = "lru" if name == "s3-fifo" and options else name
    tiers = tuple(
        TierConfig(num_blocks=blocks, link=link(gbps), eviction=name) for blocks, gbps in ((40, 0.5), (90, 0.1))
    )
    tiers = tiers[:1] if options else tiers
    config = replace(
        config,
        eviction=device,
        num_gpu_blocks=70,
        tiers=OffloadConfig(tiers=tiers, **options),
        bytes_per_block=1 << 16,
    )
    planned, stepped = run(config, rows, looks)[1], run(config, rows, plans=False)[1]
    assert (planned.passes, planned.jobs, planned.events) == (stepped.passes, stepped.jobs, stepped.events)


FOUR = [Row(at * SECOND, 512, 1, (name,)) for at, name in enumerate((1, 2, 1, 3, 4, 5, 1))]
"""One prompt twice, four others that need the room, the first once more. 32 blocks each."""


def found_last(eviction: str, blocks: int = 96, host: str | None = None) -> tuple[int, int]:
    config = EngineConfig(num_gpu_blocks=blocks, block_size=16, eviction=eviction)
    if host is not None:
        tiers = OffloadConfig(tiers=(TierConfig(num_blocks=blocks, link=link(20), eviction=host),))
        config = replace(config, num_gpu_blocks=40, tiers=tiers, bytes_per_block=1 << 16)
    log = run(config, FOUR)[1]
    return log.of("admitted")[-1][2:]


@pytest.mark.parametrize("name", ["slru", "lfu", "hits-per-token", "belady"])
def test_blocks_used_twice_outlive_blocks_used_once(name):
    assert found_last("lru") == (0, 0)
    assert found_last(name) == (496, 0)
    assert found_last("lru", host="lru") == (0, 0)
    assert found_last("lru", host=name) == (0, 496)


def test_blocks_of_waiting_requests_are_protected():
    """An answer grows by 25 blocks while a prompt waits whose first half is what LRU evicts next."""
    rows = [
        Row(0, 512, 1, (1,)),
        Row(SECOND, 512, 1, (2,)),
        Row(2 * SECOND, 1024, 400, (3, 4)),
        Row(2 * SECOND + 1, 1008, 1, (1, 5)),
    ]
    config = EngineConfig(num_gpu_blocks=130, block_size=16, max_num_seqs=1)
    found = {
        name: run(replace(config, eviction=name), rows)[1].of("admitted")[-1][2] for name in ("lru", "queue-informed")
    }
    assert found["lru"] < found["queue-informed"] == 512


def test_an_oracle_is_for_replays_only():
    with pytest.raises(ConfigError, match="belady needs to know the future, which only the replay of a trace does"):
        make_core(EngineConfig(eviction="belady"))
    tiers = OffloadConfig(tiers=(TierConfig(num_blocks=9, eviction="belady"),))
    with pytest.raises(ConfigError, match="belady needs to know the future"):
        make_core(EngineConfig(tiers=tiers, bytes_per_block=1))


def test_eviction_policies_refuse_unsupported_uses():
    with pytest.raises(ConfigError, match="queue-informed protects what the queue of one engine waits for"):
        TierConfig(num_blocks=9, eviction="queue-informed")
    tiers = OffloadConfig(tiers=(TierConfig(num_blocks=90),), policy="on_eviction")
    with pytest.raises(ConfigError, match="on_eviction copies what the device evicts next"):
        make_core(EngineConfig(eviction="s3-fifo", tiers=tiers, bytes_per_block=1))
    with pytest.raises(
        ConfigError, match=r"unknown option 'x' of the eviction policy slru: choose one of uses, protected"
    ):
        EngineConfig(eviction="slru", eviction_options={"x": 1}).check()
    with pytest.raises(ConfigError, match=r"unknown option 'x' of the eviction policy lru: it has none"):
        TierConfig(num_blocks=9, eviction_options={"x": 1})
    with pytest.raises(ConfigError, match="uses of the eviction policy slru must be at least 0, got -1"):
        EngineConfig(eviction="slru", eviction_options={"uses": -1}).check()
