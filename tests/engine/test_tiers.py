"""Lower tiers under the engine: the sixth micro-scenario, plans against single steps, and the seed's review points."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.engine.driving import Log, Row, drive, drive_together, replay
from tests.engine.test_plans import configs, same, workloads

from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job
from kvyard.engine.ranks import Ranks
from kvyard.engine.timing import FixedTiming
from kvyard.engine.together import begin_together
from kvyard.hashing import TraceChain
from kvyard.tiers import OffloadConfig, TierConfig, Timeline
from kvyard.tiers.links import LaneConfig, LinkConfig


def link(gbps: float, discipline: str = "fair", latency: int = 0) -> LinkConfig:
    lane = LaneConfig(bandwidth=int(gbps * 1e9), first_byte_ns=latency)
    return LinkConfig(discipline=discipline, outward=lane, inward=lane)


def host(blocks: int, gbps: float = 32, **options) -> OffloadConfig:
    return OffloadConfig(tiers=(TierConfig(num_blocks=blocks, link=link(gbps)),), **options)


POLICIES = [
    {},
    {"policy": "write_through_generated"},
    {"policy": "after_hits", "min_uses": 2},
    {"policy": "on_eviction", "offload_ahead": 8},
    {"policy": "on_eviction", "offload_ahead": 4, "on_unclean": "drop"},
    {"blocks_per_chunk": 2},
    {"offload_batch_size": 4},
    {"last_block": "recompute-block"},
    {"last_block": "recompute-token"},
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
    return replace(config, tiers=tiers, bytes_per_block=1 << 16)


@given(tiered(), workloads())
@settings(max_examples=40)
def test_plans_are_single_steps(config, work):
    same(config, *work)


# -- sharing ----------------------------------------------------------------------------------------------------------


def shared_rows(seed: int, count: int = 40) -> list[Row]:
    rng = random.Random(seed)
    now, out = 0, []
    for at in range(count):
        now += int(rng.expovariate(20) * 1e9)
        out.append(Row(now, rng.randrange(80, 640), rng.randrange(1, 60), (rng.randrange(3), 100 + at)))
    return out


def sharing(host_scope: str, block_bytes: int, **options) -> EngineConfig:
    tiers = OffloadConfig(
        tiers=(
            TierConfig(num_blocks=64, scope=host_scope, link=link(20)),
            TierConfig(num_blocks=200, scope="shared", link=link(4, latency=100_000)),
        ),
        **options,
    )
    return EngineConfig(num_gpu_blocks=60, block_size=16, bytes_per_block=block_bytes, max_num_seqs=4, tiers=tiers)


SHARING = {
    "host": sharing("shared", 64 << 20),
    "host, some": sharing("shared", 64 << 20, policy="after_hits"),
    "host, late": sharing("shared", 1 << 20, policy="on_eviction"),
    "storage": sharing("private", 64 << 20),
    "storage, chunks": sharing("private", 1 << 20, policy="after_hits", blocks_per_chunk=2),
    "storage, late": sharing("private", 64 << 20, policy="on_eviction"),
}


@pytest.mark.parametrize("seed", [1, 7])
@pytest.mark.parametrize("name", SHARING)
def test_plans_are_single_steps_though_others_use_the_same_tiers(name, seed):
    """Another worker's store evicts at once and lands later, and a private host spills in the middle of a pass: whoever has
    planned past that must notice. Without it, each of these but the late ones goes wrong with one of the seeds.
    """
    seen = []
    for plans in (True, False):
        timeline, logs = Timeline(), [Log(), Log()]
        cores = [
            make_core(SHARING[name], name=f"w{at}", watcher=log, events=True, plans=plans, timeline=timeline)
            for at, log in enumerate(logs)
        ]
        drive_together(cores, shared_rows(seed), timeline)
        seen.append([(log.passes, log.jobs, log.events) for log in logs])
    assert seen[0] == seen[1]


def drive_ranks(engine: Ranks, rows: list[Row], timeline: Timeline) -> list[Job]:
    jobs = [
        Job(f"r{at}", TraceChain(row.ids, 512, row.length, 16, at), row.output, arrival=row.arrival)
        for at, row in enumerate(rows)
    ]
    at = 0
    while True:
        times = [engine.next_decision(), timeline.earliest()]
        if at < len(rows):
            times.append(rows[at].arrival)
        now = min((when for when in times if when is not None), default=None)
        if now is None:
            return jobs
        engine.advance(now)
        timeline.advance(now)
        while at < len(rows) and rows[at].arrival == now:
            engine.submit(jobs[at], now, at % 2)
            at += 1
        begin_together({0: engine}, [] if engine.busy else [0], now, timeline)
        engine.check_integrity()


@pytest.mark.parametrize("gbps", [None, 0.00000016])
def test_ranks_stay_in_step_when_a_shared_tier_cuts_their_plans(gbps):
    """Passes and copies end at the same instants here, so that a plan may have to be closed rather than cut."""
    seen = []
    wire = LinkConfig() if gbps is None else link(gbps)
    tiers = OffloadConfig(
        tiers=(
            TierConfig(num_blocks=100, scope="shared", link=wire),
            TierConfig(num_blocks=300, scope="shared", link=wire),
        ),
        policy="write_through_generated",
    )
    config = EngineConfig(
        num_gpu_blocks=60,
        block_size=16,
        bytes_per_block=1,
        tiers=tiers,
        timing=FixedTiming(prefill_ms=10, decode_ms=10),
    )
    rows = [replace(row, arrival=row.arrival // 10_000_000 * 10_000_000) for row in shared_rows(1)]
    for plans in (True, False):
        timeline, logs = Timeline(), [Log(), Log()]
        cores = [
            make_core(config, name=f"w@{at}", watcher=log, plans=plans, timeline=timeline)
            for at, log in enumerate(logs)
        ]
        assert all(job.state.ended for job in drive_ranks(Ranks(cores), rows, timeline))
        seen.append([(log.passes, log.jobs) for log in logs])
    assert seen[0] == seen[1]


@pytest.mark.source
def test_trimming_closes_the_plans_of_all_ranks_or_none():
    """A rank that waits has the plan of another closed, at the very instant at which a pass of it was carried out."""
    tiers = OffloadConfig(tiers=(TierConfig(num_blocks=100, scope="shared", link=link(1)),))
    config = EngineConfig(
        num_gpu_blocks=60,
        block_size=16,
        bytes_per_block=1 << 20,
        tiers=tiers,
        timing=FixedTiming(prefill_ms=10, decode_ms=10),
    )
    timeline = Timeline()
    cores = [make_core(config, name=f"w@{at}", timeline=timeline) for at in range(2)]
    engine = Ranks(cores)
    for rank in (0, 1):
        engine.submit(Job(f"r{rank}", TraceChain((rank,), 512, 10, 16, rank), 50, arrival=0), 0, rank)
    engine.begin(0)
    start = engine.next_decision()
    engine.advance(start)
    engine.begin(start)
    now = start + 20_000_000
    engine.advance(now)
    engine.check_integrity()
    assert engine.busy
    cores[1].uncertain_from = lambda now: now  # only one of them has a reason
    engine.trim(now)
    assert not engine.busy
    engine.begin(now)
    engine.check_integrity()


# -- on eviction ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_unclean", ["wait", "drop"])
def test_what_is_adopted_is_not_taken(on_unclean):
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


def test_what_a_load_takes_must_be_clean_too():
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
