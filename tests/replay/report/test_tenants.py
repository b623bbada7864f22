"""Tenants of a report: sums by tenant, added up in another way."""

from __future__ import annotations

import json
from typing import Any

import pytest

import kvyard
from kvyard.clock import MS, SECOND
from kvyard.replay.report import tenants as module
from kvyard.replay.report.files import from_json, to_json
from kvyard.replay.report.fleet_report import TenantReport
from kvyard.replay.report.page import page
from kvyard.replay.report.table import report_text
from kvyard.replay.run import SimulatedRun
from kvyard.replay.traces import TraceRequest


def rows(count: int = 60, tenants: int = 3) -> list[TraceRequest]:
    return [
        TraceRequest(
            f"{at}",
            at * SECOND // 20,
            320 + 16 * (at % 5),
            8,
            ids=tuple(range(1000 * (at % 7), 1000 * (at % 7) + 25)),
            id_block_size=16,
            **({"salt": "s"} if at % tenants == 0 else {"tenant": f"t{at % tenants}"}),
        )
        for at in range(count)
    ]


def run(requests: list[TraceRequest], **more: Any) -> SimulatedRun:
    return kvyard.replay(requests, workers=2, router="kv", block_size=16, num_gpu_blocks=200, **more)


def tenants_of(done: SimulatedRun) -> dict[str, TenantReport]:
    assert isinstance(done.report.tenants, dict)
    return done.report.tenants


def test_sums_by_tenant() -> None:
    done = run(rows(), engine_requests=2)
    found = tenants_of(done)
    assert set(found) == {"s", "t1", "t2"}
    for name, one in found.items():
        mine = [record for record in done.records if record.tenant == name]
        assert one.requests == one.finished == len(mine) == 20 and one.rejected == 0
        reused = sum(record.cached for record in mine)
        assert one.reused.part == reused and one.reused.whole == one.input_tokens == sum(r.input for r in mine)
        assert one.computed_tokens == one.input_tokens - reused + one.output_tokens and one.output_tokens == 160
        assert one.ttft.mean == pytest.approx(sum(record.ttft for record in mine) / 20 / MS)
        held = sum((r.ended - r.admitted) * r.input + (r.ended - r.first_token) * r.output / 2 for r in mine) / SECOND
        assert one.held_token_s == pytest.approx(held)
        assert one.waited_ms == pytest.approx(sum(record.waited for record in mine) / 20 / MS)
    assert from_json(to_json(done.report)) == done.report
    assert "token-s held" in report_text(done.report, 200) and 'id="tenants"' in page(done.report)


def test_tenants_beyond_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_TENANTS", 4)
    found = tenants_of(run(rows(80, tenants=10)))
    assert len(found) == 5 and list(found)[-1] == "(others)"
    assert sum(one.requests for one in found.values()) == 80
    assert found["(others)"].requests == found["(others)"].ttft.count == 48


def test_traces_without_tenants_have_no_such_key() -> None:
    done = run([TraceRequest("a", 0, 100, 4), TraceRequest("b", 0, 100, 4)])
    assert not done.report.tenants and "tenants" not in json.loads(to_json(done.report))


@pytest.mark.parametrize("quota", ["off", "borrowed", "hard", "isolated"])
def test_token_seconds_of_tenants_add_up_to_the_pool_and_its_time(quota: str) -> None:
    done = run(rows(200), host_blocks=100, cache_quota=quota)
    report, found = done.report, tenants_of(done)
    assert isinstance(report.cache_time, dict) and list(report.cache_time) == ["device", "host"]
    for tier, time in report.cache_time.items():
        blocks = 2 * {"device": 200, "host": 100}[tier]
        held = sum(one.resident_token_s[tier] for one in found.values())
        assert held == pytest.approx(time.held_token_s) and time.empty_token_s >= 0
        assert held + time.empty_token_s == pytest.approx(time.pool_token_s)
        # Each worker's ledger opens with its first request.
        assert 0.8 * blocks * 16 * report.duration_s < time.pool_token_s <= 1.1 * blocks * 16 * report.duration_s
    assert all(one.resident_token_s["device"] > 0 for one in found.values())
    lost = sum(sum(one.lost_tokens.values()) for one in found.values())
    assert lost > 0 if quota == "off" else True
    assert "of cache" in report_text(report, 240)


def test_hard_quotas_in_a_replay_keep_each_tenant_to_its_share() -> None:
    shares = {"s": 0.2, "t1": 0.2, "t2": 0.2, "*": 0.1}
    done = run(rows(300), cache_quota="hard", tenant_quotas=shares)
    for worker in done.fleet.workers:
        ledger = worker.cores[0].scheduler.manager.pool.ledger
        assert ledger is not None
        assert 0 < max(ledger.used) <= 40, "nothing runs any more"
    assert from_json(to_json(done.report)) == done.report


@pytest.mark.parametrize("backend", ["sglang", "trtllm", "vllm"])
def test_every_backend_charges_what_it_holds(backend: str) -> None:
    done = run(rows(120), backend=backend)
    for worker in done.fleet.workers:
        manager = worker.cores[0].scheduler.manager
        assert manager.pool.ledger is not None and sum(manager.pool.ledger.used) > 0
        manager.check_integrity()
