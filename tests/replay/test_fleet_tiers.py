"""A tier is an entry in a list: everything from the offload engine to the report follows from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.replay.support import request, sessions
from tests.replay.traces.support import CONVERSATION

from kvyard.blocks import Hints
from kvyard.engine.core import EngineCore
from kvyard.events.tier import LOWER_TIERS, Tier
from kvyard.replay.fleet import Fleet
from kvyard.replay.placement import WholePlacement
from kvyard.replay.report import Report, make_report
from kvyard.replay.report.table import report_text
from kvyard.replay.run import replay
from kvyard.replay.settings import BYTES_PER_TOKEN, make_config
from kvyard.replay.traces import open_trace

SETTINGS: dict[str, Any] = {
    "workers": 2,
    "num_gpu_blocks": 600,
    "block_size": 64,
    "host_blocks": 4000,
    "storage_blocks": 9000,
    "remote_blocks": 15_000,
    "object_blocks": 40_000,
    "storage_latency": 0,
    "remote_latency": "100us",
    "object_latency": "1ms",
}
ROOMS = {"num_gpu_blocks": 200, "block_size": 16, "host_blocks": 300, "storage_blocks": 500, "remote_blocks": 900}


def run(limit: int = 500, **settings: Any) -> tuple[Fleet, Report]:
    fleet = Fleet(make_config({**SETTINGS, **settings}))
    fleet.run(open_trace(CONVERSATION, limit=limit))
    for worker in fleet.workers:
        for core in worker.cores:
            core.check_integrity()
    return fleet, make_report(fleet)


@pytest.fixture(scope="module", params=["private", "shared"])
def ran(request: pytest.FixtureRequest) -> tuple[Fleet, Report]:
    return run(object_scope=request.param)


def test_every_tier_is_used_and_reported_under_its_label(ran: tuple[Fleet, Report]) -> None:
    _, report = ran
    assert list(report.tiers) == ["device", "host", "storage", "remote", "object"]
    assert list(report.transfers) == [
        *("stores", "loads", "spills", "fetches"),
        *("remote_spills", "remote_fetches", "object_spills", "object_fetches"),
    ]
    assert all(flow.transfers for flow in report.transfers.values())
    assert min(report.reuse[tier.label].part for tier in Tier) > 0
    assert sum(report.reuse[tier.label].part for tier in Tier) == report.reuse["all"].part
    for label in ("remote", "object"):
        assert sum(worker.tiers[f"{label}_tokens"] for worker in report.workers) >= report.reuse[label].part
        assert f"Loaded from {label} storage" in report_text(report)
    assert set(report.timeline.values) >= {"host", "storage", "remote", "object"}
    assert any(report.series.prompts["object"])


def test_blocks_of_a_lower_tier_went_through_those_above_it(ran: tuple[Fleet, Report]) -> None:
    _, report = ran
    moved = report.transfers
    spilled = [moved[tier.entry.stores].blocks for tier in LOWER_TIERS]
    assert spilled == sorted(spilled, reverse=True) and spilled[-1] > 0
    assert moved["loads"].blocks >= moved["object_fetches"].blocks


@pytest.mark.source
@pytest.mark.parametrize("scope", ["private", "shared"])
def test_the_router_receives_the_blocks_of_each_tier(monkeypatch: pytest.MonkeyPatch, scope: str) -> None:
    """At every decision, the chosen worker's blocks by tier are what its maps hold of the prompt."""
    small = {
        "host_blocks": 500,
        "storage_blocks": 600,
        "remote_blocks": 800,
        "object_scope": scope,
        "predicted_ttl_s": 0,
    }
    fleet = Fleet(make_config({**SETTINGS, **small}))
    assert isinstance(fleet.placement, WholePlacement)
    router = fleet.placement.pool.router
    assign = router.assign
    deepest = 0

    def watched(request: Any, now: int, exclude: Any = ()) -> Any:
        nonlocal deepest
        decision = router.preview(request, now, exclude=exclude)
        worker = next(worker for worker in fleet.workers if worker.name == decision.worker.name)
        held = tuple(blocks_by_tier(worker.cores[0], request.keys, request.num_tokens))
        assert held == decision.tiers + (0,) * (5 - len(decision.tiers))
        deepest += held[4]
        booking = assign(request, now, exclude)
        assert booking.worker.name == decision.worker and booking.overlap == sum(decision.tiers)
        return booking

    monkeypatch.setattr(router, "assign", watched)
    fleet.run(open_trace(CONVERSATION, limit=300))
    assert deepest > 100


def blocks_by_tier(core: EngineCore, keys: Any, tokens: int) -> Iterator[int]:
    """Yield the addition of each tier to the prefix that the closer ones have."""
    assert core.offload is not None
    known: set[object] = set()
    before = 0
    for pool in (core.scheduler.manager.pool, *(tier.store.pool for tier in core.offload.tiers)):
        known |= {key for _, key, _ in pool.cached_blocks()}
        held = next((at for at, key in enumerate(keys) if key not in known), len(keys))
        reach = min(held, (tokens - 1) // 64)
        yield reach - before
        before = reach


def test_plans_are_single_steps_with_five_tiers() -> None:
    small = {"num_gpu_blocks": 400, "host_blocks": 500, "storage_blocks": 800, "remote_blocks": 2000}
    _, planned = run(limit=150, **small)
    _, stepped = run(limit=150, **small, plans=False)
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


@pytest.mark.parametrize("tier", LOWER_TIERS)
def test_a_prompt_comes_up_the_chain_in_the_time_that_its_links_take(tier: Tier) -> None:
    """A prompt of 20 blocks, pushed out of all closer tiers by one that fills them, is wanted again on an idle fleet."""
    chain = LOWER_TIERS[: tier - 1]
    rooms = {f"{one.label}_blocks": 1000 if one is tier else 23 for one in chain}
    prompts = {"first": range(21), "other": range(100, 124), "again": range(21)}
    trace = [
        request(name, 100 * at, input_length=(len(ids) - 1) * 64 + 10, output_length=1, ids=list(ids), id_block_size=64)
        for at, (name, ids) in enumerate(prompts.items())
    ]
    done = replay(trace, workers=1, num_gpu_blocks=24, block_size=64, **rooms)
    nbytes = 20 * 64 * BYTES_PER_TOKEN
    again = done.records[-1]
    assert (again.cached, again.loaded) == (0, (*(0,) * (len(chain) - 1), 20 * 64))
    # One tier closer at a time: the latency of each link, then all bytes at its speed. A GB/s is a byte per nanosecond.
    takes = sum(one.entry.latency_ns + nbytes / one.entry.gb_s for one in chain)
    assert again.loading == pytest.approx(takes, abs=len(chain)) and again.admitted - again.arrival == again.loading
    assert done.report.reuse[tier.label].part == 20 * 64 == done.report.reuse["all"].part
    for one in chain:
        # Stored once down the chain, both prompts; fetched or loaded once up it, the first. Also by the link's counts.
        moved = done.report.transfers
        assert (moved[one.entry.stores].blocks, moved[one.entry.loads].blocks) == (43, 20)
        links = done.report.tiers[one.label].links
        assert (links["outward"].bytes, links["inward"].bytes) == (43 * 64 * BYTES_PER_TOKEN, nbytes)


def test_reports_leave_out_tiers_beyond_the_third_that_no_worker_has(tmp_path: Path) -> None:
    for object_blocks, has in ((0, False), (3000, True)):
        done = replay(sessions(20), workers=1, **{**ROOMS, "object_blocks": object_blocks})
        rows = tmp_path / f"{has}.jsonl"
        done.save(per_request=rows)
        row = msgspec.json.decode(rows.read_bytes().splitlines()[0])
        places = (done.report.reuse, done.report.tiers, done.report.timeline.values)
        assert [("object" in place, "remote" in place) for place in places] == [(has, True)] * 3
        assert ("object_tokens" in row, "remote_tokens" in row) == (has, True)
        assert ("object_tokens" in done.report.workers[0].tiers) == has
