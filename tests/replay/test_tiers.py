"""A fourth tier is an entry in a configuration: everything from the offload engine to the report follows from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.replay.support import sessions
from tests.replay.traces.support import CONVERSATION

from kvyard.blocks import Hints
from kvyard.engine.core import EngineCore
from kvyard.events.types import Tier
from kvyard.replay.fleet import Fleet
from kvyard.replay.placement import WholePlacement
from kvyard.replay.report import Report, make_report
from kvyard.replay.report.table import report_text
from kvyard.replay.run import replay
from kvyard.replay.settings import make_config
from kvyard.replay.traces import open_trace

SETTINGS: dict[str, Any] = {
    "workers": 2,
    "num_gpu_blocks": 600,
    "block_size": 64,
    "host_blocks": 4000,
    "storage_blocks": 9000,
    "remote_blocks": 40_000,
    "storage_latency": 0,
    "remote_latency": "100us",
}


def run(limit: int = 500, **settings: Any) -> tuple[Fleet, Report]:
    fleet = Fleet(make_config({**SETTINGS, **settings}))
    fleet.run(open_trace(CONVERSATION, limit=limit))
    for worker in fleet.workers:
        for core in worker.cores:
            core.check_integrity()
    return fleet, make_report(fleet)


@pytest.fixture(scope="module", params=["private", "shared"])
def ran(request: pytest.FixtureRequest) -> tuple[Fleet, Report]:
    return run(remote_scope=request.param)


def test_every_tier_is_used_and_reported_under_its_label(ran: tuple[Fleet, Report]) -> None:
    _, report = ran
    assert list(report.tiers) == ["device", "host", "storage", "remote"]
    assert list(report.transfers) == ["stores", "loads", "spills", "fetches", "remote_spills", "remote_fetches"]
    assert all(flow.transfers for flow in report.transfers.values())
    assert min(report.reuse[tier.label].part for tier in Tier) > 0
    assert sum(report.reuse[tier.label].part for tier in Tier) == report.reuse["all"].part
    assert sum(worker.tiers["remote_tokens"] for worker in report.workers) >= report.reuse["remote"].part
    assert set(report.timeline.values) >= {"host", "storage", "remote"}
    assert "Loaded from remote storage" in report_text(report)


def test_what_a_lower_tier_has_went_through_those_above_it(ran: tuple[Fleet, Report]) -> None:
    _, report = ran
    moved = report.transfers
    assert moved["stores"].blocks >= moved["spills"].blocks >= moved["remote_spills"].blocks > 0
    assert moved["loads"].blocks >= moved["remote_fetches"].blocks


@pytest.mark.source
@pytest.mark.parametrize("scope", ["private", "shared"])
def test_the_router_is_told_what_each_tier_adds(monkeypatch: pytest.MonkeyPatch, scope: str) -> None:
    """At every decision, the chosen worker's blocks by tier are what its maps hold of the prompt."""
    small = {"host_blocks": 1000, "storage_blocks": 1500, "remote_scope": scope, "predicted_ttl_s": 0}
    fleet = Fleet(make_config({**SETTINGS, **small}))
    assert isinstance(fleet.placement, WholePlacement)
    router = fleet.placement.pool.router
    route = router.route
    deepest = 0

    def watched(request: Any, now: int, **options: Any) -> Any:
        nonlocal deepest
        decision = route(request, now, **options)
        worker = next(one for one in fleet.workers if one.name == decision.worker.name)
        found = tuple(blocks_by_tier(worker.cores[0], request.keys, request.num_tokens))
        assert found == decision.tiers + (0,) * (4 - len(decision.tiers))
        deepest += found[3]
        return decision

    monkeypatch.setattr(router, "route", watched)
    fleet.run(open_trace(CONVERSATION, limit=300))
    assert deepest > 100


def blocks_by_tier(core: EngineCore, keys: Any, tokens: int) -> Iterator[int]:
    """What each tier adds to the prefix that the closer ones have."""
    assert core.offload is not None
    known: set[object] = set()
    before = 0
    for pool in (core.scheduler.manager.pool, *(tier.store.pool for tier in core.offload.tiers)):
        known |= {key for _, key, _ in pool.cached_blocks()}
        held = next((at for at, key in enumerate(keys) if key not in known), len(keys))
        reach = min(held, (tokens - 1) // 64)
        yield reach - before
        before = reach


def test_plans_are_single_steps_with_four_tiers() -> None:
    _, planned = run(limit=150, num_gpu_blocks=400, host_blocks=500, storage_blocks=800)
    _, stepped = run(limit=150, num_gpu_blocks=400, host_blocks=500, storage_blocks=800, plans=False)
    assert planned.latency == stepped.latency and planned.reuse == stepped.reuse and planned.tiers == stepped.tiers


@pytest.mark.parametrize("policy", ["write_through", "on_eviction"])
def test_the_end_of_a_session_keeps_no_tier_from_a_copy_that_others_will_want(policy):
    """Sessions of one turn over a few prompts: all of them end, and the prompts are wanted again."""
    trace = list(
        sessions(
            80, seed=1, arrivals="poisson:rate=4", turns="fixed:1", tree="6x800", input="fixed:64", output="fixed:8"
        )
    )
    ended = [msgspec.structs.replace(row, hints=Hints(session_end=True)) for row in trace]
    reused = []
    for rows in (trace, ended):
        done = replay(
            rows, workers=1, block_size=16, num_gpu_blocks=120, host_blocks=4000, offload_policy=policy, heed_hints=True
        )
        reused.append(done.report.reuse["all"].part)
    assert reused[1] >= 0.95 * reused[0] > 0
