"""Data-parallel ranks: they start every pass together, whatever cuts the plans of one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.engine.driving import Log, LongestModel, LongestTiming, Row, drive, link
from tests.engine.test_together import shared_rows

from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job
from kvyard.engine.ranks import Ranks
from kvyard.engine.timing import FixedTiming, TimingConfig
from kvyard.engine.together import begin_together
from kvyard.hashing import TraceChain
from kvyard.tiers import OffloadConfig, TierConfig, Timeline
from kvyard.tiers.links import LinkConfig


def drive_ranks(
    engine: Ranks, rows: list[Row], timeline: Timeline, rank_of: Callable[[int], int] = lambda at: at % 2
) -> list[Job]:
    jobs = [
        Job(f"r{at}", TraceChain(row.ids, 512, row.length, 16, at), row.output, arrival=row.arrival)
        for at, row in enumerate(rows)
    ]
    at = 0
    given_up = [None if row.cancel is None else row.arrival + row.cancel for row in rows]
    while True:
        times = [engine.next_decision(), timeline.earliest()]
        if at < len(rows):
            times.append(rows[at].arrival)
        times += [when for when in given_up if when is not None]
        now = min((when for when in times if when is not None), default=None)
        if now is None:
            return jobs
        engine.advance(now)
        timeline.advance(now)
        while at < len(rows) and rows[at].arrival == now:
            engine.submit(jobs[at], now, rank_of(at))
            at += 1
        for who, when in enumerate(given_up):
            if when == now:
                engine.cancel(jobs[who], now, rank_of(who))
                given_up[who] = None
        begin_together({0: engine}, [0] if engine.ahead or not engine.busy else [], now, timeline)
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
    engine.trim(engine.uncertain_from(now), now)
    assert not engine.busy
    engine.begin(now)
    engine.check_integrity()


# -- passes decided ahead ------------------------------------------------------------------------------------------------

AHEAD = EngineConfig(
    num_gpu_blocks=40,
    block_size=16,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    timing=LongestTiming(),
    async_scheduling=True,
)


@st.composite
def busy_rows(draw: st.DrawFn) -> list[Row]:
    """A few requests, close together or far apart."""
    rows, now = [], 0
    for at in range(draw(st.integers(1, 7))):
        now += draw(st.sampled_from((0, 0, 300_000, 1_700_000, 40_000_000)))
        rows.append(Row(now, draw(st.integers(1, 150)), draw(st.integers(1, 12)), (at,)))
    return rows


def alone(config: EngineConfig, rows: list[Row], rank: int, ranks: int = 2) -> list[Log]:
    """All of ``rows`` at one rank of an engine whose other ranks have nothing to do."""
    logs = [Log() for _ in range(ranks)]
    engine = Ranks([make_core(config, name=f"w@{at}", watcher=log, ranks=ranks) for at, log in enumerate(logs)])
    jobs = drive_ranks(engine, rows, Timeline(), lambda at: rank)
    assert all(job.state.ended for job in jobs)
    return logs


@given(busy_rows(), st.integers(0, 1))
def test_a_rank_whose_peers_are_idle_is_an_engine_by_itself(rows: list[Row], rank: int) -> None:
    """The oracle is one core with its plans; ranks step one by one."""
    log = Log()
    drive(make_core(AHEAD, watcher=log), rows)
    found = alone(AHEAD, rows, rank)
    assert (found[rank].passes, found[rank].jobs) == (log.passes, log.jobs)
    assert not found[1 - rank].passes


@given(busy_rows())
def test_ranks_with_the_same_requests_run_as_one(rows: list[Row]) -> None:
    log = Log()
    drive(make_core(AHEAD, watcher=log), rows)
    logs = [Log(), Log()]
    engine = Ranks([make_core(AHEAD, name=f"w@{at}", watcher=one, ranks=2) for at, one in enumerate(logs)])
    twice = [row for row in rows for _ in range(2)]
    drive_ranks(engine, twice, Timeline())
    for one in logs:
        assert [(start, end, decoding) for start, end, _, decoding in one.passes] == [
            (start, end, decoding) for start, end, _, decoding in log.passes
        ]


@given(busy_rows())
def test_passes_of_ranks_start_and_end_together(rows: list[Row]) -> None:
    logs = [Log(), Log(), Log()]
    engine = Ranks([make_core(AHEAD, name=f"w@{at}", watcher=one, ranks=3) for at, one in enumerate(logs)])
    jobs = drive_ranks(engine, rows, Timeline(), lambda at: at % 3)
    assert all(job.state.ended for job in jobs)
    ends = {}
    for log in logs:
        for start, end, *_ in log.passes:
            assert ends.setdefault(start, end) == end, "a pass takes as long as its slowest rank"
    starts = sorted(ends)
    assert all(ends[before] <= after for before, after in pairwise(starts))


def test_a_request_for_an_idle_rank_starts_with_the_next_pass() -> None:
    """A rank without requests runs dummy passes, with none decided on behind them: it looks at its queue after each."""
    config = replace(AHEAD, timing=FixedTiming(prefill_ms=10, decode_ms=10))
    logs = [Log(), Log()]
    engine = Ranks([make_core(config, name=f"w@{at}", watcher=one, ranks=2) for at, one in enumerate(logs)])
    rows = [Row(0, 20, 9, (1,)), Row(15_000_000, 20, 2, (2,))]
    drive_ranks(engine, rows, Timeline())
    assert [start for start, *_ in logs[0].passes][:4] == [0, 10_000_000, 20_000_000, 30_000_000]
    assert logs[1].passes[0][:2] == (20_000_000, 30_000_000)


def test_a_request_for_a_busy_rank_waits_for_the_pass_that_is_decided_on() -> None:
    config = replace(AHEAD, timing=FixedTiming(prefill_ms=10, decode_ms=10))
    logs = [Log(), Log()]
    engine = Ranks([make_core(config, name=f"w@{at}", watcher=one, ranks=2) for at, one in enumerate(logs)])
    rows = [Row(0, 20, 9, (1,)), Row(0, 20, 9, (2,)), Row(15_000_000, 20, 2, (3,))]
    drive_ranks(engine, rows, Timeline())
    started = next(start for start, _, chunks, _ in logs[0].passes if "r2" in str(chunks))
    assert started == 30_000_000, "the pass from 20 to 30 ms was decided on at 10"


@pytest.mark.parametrize("cancel", range(0, 60_000_000, 2_500_000))
def test_a_request_cancelled_at_any_time_leaves_nothing_behind(cancel: int) -> None:
    config = replace(AHEAD, timing=FixedTiming(prefill_ms=10, decode_ms=10))
    engine = Ranks([make_core(config, name=f"w@{at}", ranks=2) for at in range(2)])
    rows = [Row(0, 20, 9, (1,)), Row(5_000_000, 20, 4, (2,), cancel=cancel), Row(5_000_000, 20, 4, (3,))]
    jobs = drive_ranks(engine, rows, Timeline())
    assert all(job.state.ended for job in jobs)
    assert [core.scheduler.manager.pool.free for core in engine.cores] == [40, 40]


class UnevenModel(LongestModel):
    """A millisecond more for every token that the ranks compute beyond as many each."""

    def uneven_ns(self, tokens: int, of_all: Sequence[int]) -> int:
        return 1_000_000 * (sum(of_all) - len(of_all) * tokens)


class UnevenTiming(TimingConfig, frozen=True, kw_only=True, tag="uneven"):
    def model(self, capacity_tokens: int) -> UnevenModel:
        return UnevenModel()


@pytest.mark.parametrize("ahead", [False, True])
def test_experts_take_what_all_ranks_compute(ahead: bool) -> None:
    config = replace(AHEAD, timing=UnevenTiming(), async_scheduling=ahead)
    logs = [Log(), Log()]
    engine = Ranks([make_core(config, name=f"w@{at}", watcher=one, ranks=2) for at, one in enumerate(logs)])
    drive_ranks(engine, [Row(0, 20, 1, (1,)), Row(0, 50, 1, (2,))], Timeline())
    assert logs[0].passes[0][:2] == logs[1].passes[0][:2] == (0, max(1_020_000 + 30_000_000, 1_050_000 - 30_000_000))


def test_the_first_rank_is_meant_where_none_is_named() -> None:
    config = EngineConfig(num_gpu_blocks=100, timing=FixedTiming(prefill_ms=1, decode_ms=1))
    engine = Ranks([make_core(config), make_core(config)])
    job = Job("a", TraceChain(range(1), 64, 64, 64, 1), 5)
    engine.submit(job, 0)
    engine.begin(0)
    assert [core.busy for core in engine.cores] == [True, False]
    engine.cancel(job, 0)
    engine.advance(10_000_000)
    assert job.output < 5 and not engine.busy
