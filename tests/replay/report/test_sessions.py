"""Sessions of a report against closed forms: times of requests that run alone are known from the timing model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.replay.support import sessions as talks

import kvyard
from kvyard.clock import MS, SECOND
from kvyard.engine.config import EngineConfig
from kvyard.engine.timing import FixedTiming, make_timing
from kvyard.errors import KvyardError
from kvyard.replay.config import ReplayConfig, WorkerConfig
from kvyard.replay.report import Report
from kvyard.replay.report.files import from_json, to_json
from kvyard.replay.report.metrics import read_metrics
from kvyard.replay.report.page import page
from kvyard.replay.report.session_report import CAUSES, SessionsReport
from kvyard.replay.report.slo import judge, missed, parse_limits, violation
from kvyard.replay.report.table import report_text
from kvyard.replay.run import SimulatedRun
from kvyard.replay.traces import TraceRequest
from kvyard.router import RouterConfig

SIZE = 16
ENGINE = EngineConfig(block_size=SIZE, num_gpu_blocks=512)


def turn(name: str, session: str | None, blocks: int, *, first: int = 0, **more: Any) -> TraceRequest:
    """A prompt of whole blocks whose ids begin at ``first``."""
    fields: dict[str, Any] = {"arrival": 0, "output_length": 5, **more}
    return TraceRequest(
        id=name,
        session=session,
        input_length=blocks * SIZE,
        ids=tuple(range(first, first + blocks)),
        id_block_size=SIZE,
        **fields,
    )


def run(rows: list[TraceRequest], engine: EngineConfig = ENGINE, *, workers: int = 1, **more: Any) -> SimulatedRun:
    config = ReplayConfig(
        workers=(WorkerConfig(engine=engine, count=workers),), router=RouterConfig(policy="round-robin"), **more
    )
    return kvyard.replay(rows, config=config)


def sessions_of(done: SimulatedRun) -> SessionsReport:
    found = done.report.sessions
    assert isinstance(found, SessionsReport)
    return found


def alone_ms(tokens: int, cached: int, output: int = 5, engine: EngineConfig = ENGINE) -> float:
    timing = make_timing(engine.timing, engine.capacity_tokens)
    ns = timing.pass_ns([(tokens - cached, cached)], 0, 0, 0)
    return (ns + int(timing.decode_ns(1, tokens + 1, output - 1, tokens + 1).sum())) / MS


def test_one_session_on_one_worker() -> None:
    rows = [
        turn("a", "s", 10),
        turn("b", "s", 20, delay=3 * SECOND),
        turn("c", "s", 30, delay=7 * SECOND),
    ]
    found = sessions_of(run(rows))
    service = alone_ms(160, 0) + alone_ms(320, 160) + alone_ms(480, 320)
    assert found.count == found.finished == 1 and found.requests == 3
    assert found.completion.mean == pytest.approx(10_000 + service)
    assert found.service.mean == pytest.approx(service)
    assert found.slowdown is not None and found.slowdown.mean == 1.0
    assert found.causes_ms["think"] == 10_000 and found.causes_ms["tool"] == found.causes_ms["queue"] == 0
    assert found.jain == 1.0
    assert found.reuse["within"].part == 160 + 320 and found.reuse["within"].whole == 960
    assert found.reuse["across"].part == found.reuse["again"].part == 0
    (slow,) = found.slowest
    assert [one.cached for one in slow.turns] == [0, 160, 320] and [one.own for one in slow.turns] == [0, 160, 320]


def test_a_tool_runs_in_between() -> None:
    rows = [turn("a", "s", 10, tool_call=True), turn("b", "s", 20, delay=3 * SECOND), turn("c", "s", 30, delay=SECOND)]
    causes = sessions_of(run(rows)).causes_ms
    assert (causes["tool"], causes["think"]) == (3000, 1000)


def test_two_sessions_that_alternate_find_nothing_in_a_cache_for_one() -> None:
    engine = EngineConfig(block_size=SIZE, num_gpu_blocks=21)
    rows = [
        turn("a", "s", 20, delay=0),
        turn("b", "t", 20, first=1000, arrival=10 * SECOND),
        turn("c", "s", 20, delay=20 * SECOND),
        turn("d", "t", 20, first=1000, delay=20 * SECOND),
    ]
    found = sessions_of(run(rows, engine))
    assert found.finished == 2 and found.reuse["within"].part == 0
    assert found.reuse["again"].part == 2 * 320
    assert found.slowdown is not None
    # Alone, all but the last block of the second prompt would have been found.
    cold, warm = alone_ms(320, 0, engine=engine), alone_ms(320, 304, engine=engine)
    assert found.slowdown.mean == pytest.approx(2 * cold / (cold + warm))
    assert {one.evicted for slow in found.slowest for one in slow.turns} == {0, 320}


def test_reuse_across_sessions_and_migrations() -> None:
    rows = [
        turn("a", "s", 10),
        turn("b", "t", 10, arrival=10 * SECOND),
        turn("c", "t", 12, delay=10 * SECOND),
        turn("d", "t", 14, delay=10 * SECOND),
    ]
    found = sessions_of(run(rows))
    # The last block is always computed again: b finds 9 blocks of a's; c and d find their own.
    assert found.reuse["across"].part == 9 * SIZE and found.reuse["within"].part == (10 + 12) * SIZE
    moved = sessions_of(run(rows, workers=2)).migrations
    assert (moved.part, moved.whole) == (2, 2)


def test_sub_agents_are_part_of_the_session_that_called_them() -> None:
    rows = [
        turn("a", "s", 10, tool_call=True),
        turn("x", "s/1", 10, first=500, delay=SECOND, after=("a",), root="s"),
        turn("y", "s/2", 10, first=700, output_length=400, delay=SECOND, after=("a",), root="s"),
        turn("b", "s", 12, delay=2 * SECOND, after=("x", "y")),
    ]
    done = run(rows, workers=3)
    found = sessions_of(done)
    records = {record.id: record for record in done.records}
    assert found.count == 1 and found.requests == 4
    assert found.completion.mean == (records["b"].ended - records["a"].arrival) / MS
    assert sum(found.causes_ms.values()) == pytest.approx(found.completion.mean)
    assert (found.causes_ms["tool"], found.causes_ms["think"]) == (1000, 2000)
    assert found.causes_ms["decode"] > (records["y"].ended - records["y"].first_token) / MS
    assert [one.agent for one in found.slowest[0].turns] == ["", "s/1", "s/2", ""]


def test_recorded_times_that_the_fleet_delays_are_no_think_time() -> None:
    slow = EngineConfig(block_size=SIZE, num_gpu_blocks=512, timing=FixedTiming(prefill_ms=10_000, decode_ms=1))
    rows = [turn("a", "s", 10), turn("b", "s", 20, arrival=4 * SECOND), turn("c", "s", 30, arrival=60 * SECOND)]
    found = sessions_of(run(rows, slow))
    assert found.slowdown is not None and found.slowdown.mean == 1.0
    assert found.causes_ms["think"] == pytest.approx(60_000 - 2 * (10_000 + 4))


@pytest.mark.parametrize(
    "settings",
    [
        {"workers": 2, "num_gpu_blocks": 256},
        {"workers": 2, "num_gpu_blocks": 256, "concurrency": 6},
        {"workers": 2, "num_gpu_blocks": 200, "host_blocks": 2000},
        {"prefill_workers": 1, "decode_workers": 1, "num_gpu_blocks": 400},
        {"workers": 3, "num_gpu_blocks": 256, "warm_up": "30"},
    ],
    ids=["open", "closed", "tiers", "roles", "warm-up"],
)
def test_conservation(settings: dict[str, Any]) -> None:
    done = kvyard.replay(talks(150), router="kv", block_size=SIZE, **settings)
    found = sessions_of(done)
    assert sum(found.causes_ms.values()) == pytest.approx(found.completion.mean)
    for slow in found.slowest:
        assert sum(slow.causes_ms.values()) == pytest.approx(slow.completion_ms)
    by_id = {record.id: record for record in done.records}
    for one in (one for slow in found.slowest for one in slow.turns):
        record = by_id[one.id]
        assert sum(one.ms.values()) == pytest.approx((record.ended - record.arrival) / MS)
    resident = found.residency
    assert resident is not None
    assert resident.held + resident.idle + resident.free == pytest.approx(resident.pool)
    assert 0 < resident.held <= resident.pool and resident.idle >= 0 and resident.free >= 0
    blocks = sum(core.scheduler.manager.pool.num_blocks - 1 for one in done.fleet.workers for core in one.cores)
    assert resident.pool == pytest.approx(blocks * SIZE * done.report.duration_s)


def test_residency_of_one_request() -> None:
    timing = FixedTiming(prefill_ms=1000, decode_ms=100)
    rows = [turn("a", "s", 10, output_length=11), turn("b", "s", 10, output_length=1, delay=9 * SECOND)]
    resident = sessions_of(run(rows, EngineConfig(block_size=SIZE, num_gpu_blocks=512, timing=timing))).residency
    assert resident is not None
    # 10 blocks for the second of its prefill, an 11th with the first token; 10 full ones idle for 9 s.
    assert resident.idle == pytest.approx(10 * SIZE * 9, rel=0.02)
    assert resident.kept == pytest.approx(9 * SIZE * 9, rel=0.01)
    assert resident.held == pytest.approx(10 * SIZE * 1 + 11 * SIZE * 1 + 10 * SIZE * 1, rel=0.1)


def test_sessions_that_did_not_finish_count_apart() -> None:
    rows = [turn("a", "s", 10), turn("b", "t", 600, first=5000), turn("c", "t", 2, first=9000, delay=0)]
    found = sessions_of(run(rows))
    assert (found.count, found.finished, found.completion.count) == (2, 1, 1)


def test_traces_without_sessions_have_no_such_key() -> None:
    done = run([turn("a", None, 10), turn("b", None, 10, arrival=SECOND)])
    assert not done.report.sessions and "sessions" not in json.loads(to_json(done.report))
    assert read_metrics(done.report)["session_p90"] is None


def shown() -> Report:
    return kvyard.replay(talks(60), workers=2, router="kv", block_size=SIZE, slo="session_p90<5m").report


def test_table_page_and_file_show_sessions() -> None:
    report = shown()
    assert from_json(to_json(report)) == report
    text = report_text(report)
    assert "Service time, without tools and think time" in text and "Jain's index" in text
    html = page(report)
    assert 'id="sessions"' in html and "<summary>" in html and report.sessions
    assert all(one.turns[0].id in html for one in report.sessions.slowest)
    assert report_text(from_json(to_json(report))) == report_text(report), "its order is not that of the file's keys"
    assert set(report.sessions.causes_ms) == set(CAUSES)


def test_limits_on_sessions() -> None:
    report = shown()
    assert report.goodput is not None and report.goodput.percentiles and report.sessions
    one = report.goodput.percentiles["session_p90"]
    assert one.limit_ms == 300_000 and one.value_ms == report.sessions.completion.p90 and one.met
    (limit,) = parse_limits("session_p90<5m")
    assert limit.violation(read_metrics(report)["session_p90"] or 0.0) <= 0
    assert str(limit) == "session_p90 ≤ 5 min 0 s"
    with pytest.raises(KvyardError, match="Write session_p99=5m"):
        parse_limits("session<5m")


def test_a_run_without_sessions_misses_limits_on_them() -> None:
    run = kvyard.replay([TraceRequest("a", 0, 100, 5)], block_size=SIZE, slo="session_p90<5m")
    verdict = judge(run.report)
    assert verdict is not None and not verdict.met
    assert verdict.why == "Session p90 isn't known: no session finished (limit 5 min 0 s)"
    limits = parse_limits("session_p90<5m,session_jain>0.5")
    values = read_metrics(run.report)
    assert violation(values, limits) == 2 and missed(values, limits).count("no session finished") == 2
    live = missed({"session_mean": 5.0}, parse_limits("session_jain>0.5"))
    assert live.endswith("isn't known: its sessions weren't replayed alone (limit 0.500)")
