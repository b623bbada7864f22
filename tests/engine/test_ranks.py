"""Data-parallel ranks: they start every pass together, whatever cuts the plans of one of them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.engine.driving import Log, Row, link
from tests.engine.test_together import shared_rows

from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job
from kvyard.engine.ranks import Ranks
from kvyard.engine.timing import FixedTiming
from kvyard.engine.together import begin_together
from kvyard.hashing import TraceChain
from kvyard.tiers import OffloadConfig, TierConfig, Timeline
from kvyard.tiers.links import LinkConfig


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
