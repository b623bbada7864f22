"""Flow control in a simulated fleet: what waits before the router, in which order, and what that costs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.replay.support import sessions

import kvyard
from kvyard.clock import MS, SECOND
from kvyard.engine.config import EngineConfig
from kvyard.engine.timing import FixedTiming
from kvyard.errors import KvyardError
from kvyard.replay.config import ReplayConfig, WorkerConfig
from kvyard.replay.report.files import to_json
from kvyard.replay.report.fleet_report import FlowReport
from kvyard.replay.report.page import page
from kvyard.replay.report.table import report_text
from kvyard.replay.run import SimulatedRun
from kvyard.replay.traces import TraceRequest
from kvyard.router import RouterConfig
from kvyard.router.flow import FLOWS, FlowConfig

ENGINE = EngineConfig(block_size=16, num_gpu_blocks=512, timing=FixedTiming(prefill_ms=1000, decode_ms=100))


def row(name: str, at: float = 0, output: int = 11, **more: Any) -> TraceRequest:
    return TraceRequest(name, round(at * SECOND), 100, output, **more)


def run(rows: list[TraceRequest], workers: int = 1, most: int | None = 1, **more: Any) -> SimulatedRun:
    kinds = more.pop("kinds", (WorkerConfig(engine=ENGINE, count=workers),))
    config = ReplayConfig(workers=kinds, router=RouterConfig(policy="round-robin"), engine_requests=most, **more)
    return kvyard.replay(rows, config=config)


def order(done: SimulatedRun) -> str:
    return "".join(record.id for record in sorted(done.records, key=lambda record: record.admitted))


def flow_of(done: SimulatedRun) -> FlowReport:
    found = done.report.flow
    assert isinstance(found, FlowReport)
    return found


def test_one_at_a_time() -> None:
    done = run([row("a"), row("b"), row("c", 0.5)])
    # 1 s for the prompt and 10 steps of 0.1 s: a request every 2 s.
    assert [record.waited / SECOND for record in done.records] == [0, 2, 3.5]
    assert [record.ended / SECOND for record in done.records] == [2, 4, 6]
    flow = flow_of(done)
    assert flow.held.part == 2 and flow.longest == 2 and flow.overtaken == 0
    assert flow.waited.mean == 2750 and flow.waited.max == 3500


def test_priorities() -> None:
    rows = [row("a"), row("b", priority=2), row("c", 0.1, priority=1), row("d", 0.2)]
    done = run(rows, flow=FlowConfig(policy="priority"))
    assert order(done) == "adcb" and flow_of(done).overtaken == 3


def test_sessions_with_less_service_go_first() -> None:
    rows = [
        row("a", session="s", output=101),
        row("b", session="s", delay=0),
        row("c", 1, session="t"),
        row("d", 1.1, session="u"),
    ]
    assert order(run(rows)) == "acdb"
    rows.append(row("e", 11.5, session="t", output=1))
    done = run(rows, flow=FlowConfig(policy="las", options={"half_life_s": 0, "wait_weight": 0}))
    assert order(done) == "acdeb"


@pytest.mark.parametrize("policy", FLOWS.names())
def test_a_limit_that_nothing_reaches_changes_nothing(policy: str) -> None:
    trace = list(sessions(60))
    plain = kvyard.replay(trace, workers=2, router="kv", block_size=16)
    held = kvyard.replay(trace, workers=2, router="kv", block_size=16, engine_requests=1000, flow=policy)
    reports = [json.loads(to_json(done.report)) for done in (plain, held)]
    for report in reports:
        report.pop("config")
    assert reports[1].pop("flow")["held"]["part"] == 0
    assert reports[0] == reports[1]


@pytest.mark.parametrize("policy", FLOWS.names())
def test_all_are_served_and_no_worker_has_more_than_it_may(policy: str) -> None:
    trace = list(sessions(150, arrivals="poisson:rate=40"))
    done = kvyard.replay(trace, workers=2, router="kv", block_size=16, engine_requests=3, flow=policy)
    assert done.report.requests["finished"] == 150 and flow_of(done).held.part > 30
    events = sorted(
        event
        for record in done.records
        for event in ((record.arrival + record.waited, 1, record.worker), (record.ended, -1, record.worker))
    )
    for name in ("w0", "w1"):
        here = 0
        for _, change, worker in events:
            here += change if worker == name else 0
            assert here <= 3
    again = kvyard.replay(trace, workers=2, router="kv", block_size=16, engine_requests=3, flow=policy, plans=False)
    assert [record.ended for record in again.records] == [record.ended for record in done.records]


def test_a_bounded_queue_refuses() -> None:
    done = run([row(name) for name in "abcde"], queue=2)
    assert [record.status for record in done.records] == ["finished"] * 3 + ["rejected"] * 2
    assert done.records[-1].reason == "2 requests wait already"
    assert flow_of(done).refused == {"full": 2}


def test_tenants_of_a_trace() -> None:
    rows = [row("x", tenant="flood"), *(row(f"{at}", tenant="flood") for at in range(4)), row("q", 0.1, tenant="quiet")]
    assert order(run(rows)) == "x0123q"
    assert order(run(rows, flow=FlowConfig(policy="fair"))) == "xq0123"


def test_workers_that_fail_and_come() -> None:
    kinds = (WorkerConfig(engine=ENGINE, fail=3 * SECOND), WorkerConfig(engine=ENGINE, start=10 * SECOND))
    done = run([row(name) for name in "abc"], kinds=kinds)
    assert [record.status for record in done.records] == ["finished"] * 3
    assert [record.ended / SECOND for record in done.records] == [2, 14, 12]  # who starts over is the last in the queue
    gone = run([row(name) for name in "abc"], kinds=kinds[:1])
    assert [record.status for record in gone.records] == ["finished", "failed", "failed"]


def test_a_request_that_starts_over_keeps_no_place_of_its_tenants() -> None:
    kinds = (WorkerConfig(engine=ENGINE, fail=3 * SECOND), WorkerConfig(engine=ENGINE, start=10 * SECOND))
    rows = [row(name, tenant="t") for name in "abc"]
    done = run(rows, kinds=kinds, flow=FlowConfig(policy="fair", tenant_requests=1))
    assert [record.status for record in done.records] == ["finished"] * 3


def test_the_report_says_why_requests_waited() -> None:
    rows = [
        row("x", tenant="flood"),
        *(row(f"{at}", tenant="flood") for at in range(12)),
        row("q", 0.1, tenant="quiet"),
    ]
    done = run(rows, flow=FlowConfig(policy="fair"))
    waits = flow_of(done).longest_waits
    assert [wait.id for wait in waits] == [str(at) for at in range(11, 1, -1)], "the ten that waited longest"
    assert [wait.waited_ms for wait in waits] == [2000.0 * (at + 2) for at in range(11, 1, -1)]
    longest = waits[0]
    assert (longest.tenant, longest.arrival_s, longest.ahead, longest.overtaken) == ("flood", 0.0, 11, 1)
    assert "its tenant has had" in longest.why
    text = " ".join(report_text(done.report).split())
    assert "11 waited longest, 26 s behind 11 requests, and 1 that came later went first: its tenant has had" in text
    html = page(done.report)
    assert "Why did these requests wait?" in html and longest.why in html


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(KvyardError, match="without engine_requests none waits"):
        kvyard.replay([row("a")], flow="las")
    with pytest.raises(KvyardError, match="engine_requests must be at least 1"):
        kvyard.replay([row("a")], engine_requests=0)
    with pytest.raises(KvyardError, match="prefill and decode workers"):
        kvyard.replay([row("a")], engine_requests=2, prefill_workers=1, decode_workers=1)


def test_the_table_shows_flow_control() -> None:
    text = report_text(run([row("a"), row("b", 0.5)], flow=FlowConfig(policy="las")).report)
    assert "las: 1 of 2 requests waited before the router, 1.5 s on average" in text


def test_the_wait_is_in_the_rows(tmp_path: Any) -> None:
    done = run([row("a"), row("b")])
    done.save(per_request=tmp_path / "rows.jsonl")
    waits = [json.loads(line)["flow_wait_ms"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert waits == [0, 2000] and done.records[1].waited == 2000 * MS


def _chat(name: str, at: float, session: str, output: int = 2) -> TraceRequest:
    """All have the same long prompt."""
    return TraceRequest(
        name, round(at * SECOND), 64_000, output, ids=list(range(1000)), id_block_size=64, session=session
    )


@pytest.mark.parametrize(("patience", "moves", "waits"), [(0.0, True, False), (0.2, True, True), (1000.0, False, True)])
def test_a_session_waits_for_its_own_worker(patience: float, moves: bool, waits: bool) -> None:
    """Its prompt is cached where another session is busy for long, and the other worker has room."""
    rows = [_chat("a", 0, "s"), _chat("c", 30, "t", 4000), _chat("b", 35, "s")]
    config = ReplayConfig(
        workers=(WorkerConfig(engine=EngineConfig(block_size=64, num_gpu_blocks=4096), count=2),),
        router=RouterConfig(policy="program", options={"patience": patience}),
        engine_requests=1,
    )
    done = kvyard.replay(rows, config=config)
    a, c, b = done.records
    assert c.worker == a.worker and c.ended > b.arrival + 20 * SECOND
    assert (b.worker != a.worker) == moves
    if not waits:
        assert b.waited == 0
    elif moves:
        assert 0 < b.waited < c.ended - b.arrival, (
            "it is placed when its patience ends, though nothing else happens then"
        )
    else:
        assert b.arrival + b.waited == c.ended and b.cached > 63_000
    assert flow_of(done).held.part == waits


def test_a_tenant_with_a_cap_leaves_places_to_others() -> None:
    """A flood that comes first has no more than its places, and others go at once."""
    flood = [TraceRequest(f"f{at}", 0, 4000, 50, tenant="flood") for at in range(40)]
    late = [TraceRequest(f"q{at}", SECOND // 10 + at, 100, 5, tenant="quiet") for at in range(2)]
    waits = {}
    for cap in (0, 6):
        done = kvyard.replay([*flood, *late], workers=2, engine_requests=4, tenant_requests=cap, block_size=16)
        quiet = [record for record in done.records if record.tenant == "quiet"]
        waits[cap] = max(record.waited for record in quiet)
        running = sorted((r.admitted, 1) for r in done.records if r.tenant == "flood")
        running += [(r.ended, -1) for r in done.records if r.tenant == "flood"]
        most = at = 0
        for _, change in sorted(running):
            at += change
            most = max(most, at)
        assert most == (6 if cap else 8) and done.report.requests["finished"] == 42
    assert waits[6] == 0 < waits[0]
