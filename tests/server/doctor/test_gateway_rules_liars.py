"""Engines whose events lie: what the gateway makes of it, and what ``kvyard doctor`` names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from random import Random
from typing import Any

import httpx
import pytest
from tests.waiting import eventually

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.cli.test_doctor import Seen
from tests.server.gateway.support import Gated, fleet, front
from tests.server.mock.support import Served

from kvyard.events.check import Checker, judge
from kvyard.events.transport import fetch_replay
from kvyard.server.gateway import promises as gateway_promises
from kvyard.server.gateway.promises import ENOUGH_ANSWERS, RecentPhantoms
from kvyard.server.mock.faults import MockFaults, changed

pytestmark = pytest.mark.zmq
SMALL: dict[str, Any] = {"engine": {"num_gpu_blocks": 64, "block_size": 16}}
"""A pool for three of the prompts below."""
LARGE: dict[str, Any] = {"engine": {"num_gpu_blocks": 2000, "block_size": 16}}
BY_EVENTS: dict[str, Any] = {"policy": "kv", "predicted_ttl_s": 0}
"""No credit for what was sent a moment ago and isn't announced."""


def prompts(count: int, seed: int = 1) -> list[str]:
    """Prompts of 19 blocks, one byte a token."""
    random = Random(seed)
    return ["".join(random.choices("abcdefgh ", k=310)) for _ in range(count)]


def set_faults(served: Served, **faults: Any) -> None:
    for worker in served.fleet.workers:
        worker.faults = changed(worker.faults, faults)


def drive(gate: Gated, texts: list[str], rounds: int) -> None:
    for _ in range(rounds):
        for text in texts:
            gate.complete(text, max_tokens=1)
    gate.idle()


def distrusted(gate: Gated) -> float:
    found = gate.metrics()
    return sum(value for name, value in found.items() if name.startswith("kvyard_index_stream_distrusted_blocks"))


def test_a_source_that_never_removes(capsys: pytest.CaptureFixture[str]) -> None:
    with front(1, mock=SMALL, router={"policy": "kv"}) as (gate, served):
        set_faults(served, never_removes=True)
        drive(gate, prompts(8), 4)
        seen = Seen(capsys, ("--gateway", gate.url))
        assert seen.says("gateway-promises", "never reported a removal", "means")
        eventually(lambda: distrusted(gate) > SMALL["engine"]["num_gpu_blocks"])
        assert seen.says("gateway-stream", "announce blocks that it doesn't have")


def empty(served: Served) -> None:
    """The engine's cache is reset, as by POST /reset_prefix_cache of vLLM."""
    assert httpx.post(f"{served.url}/reset_prefix_cache", trust_env=False).content == b""


def view(gate: Gated) -> Any:
    return gate.client.get("/dashboard/view").json()


def test_a_cache_that_was_emptied_without_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    with front(1, mock=LARGE, router=BY_EVENTS) as (gate, served):
        texts = prompts(40)
        drive(gate, texts, 2)
        assert distrusted(gate) == 0
        set_faults(served, never_clears=True)
        empty(served)
        drive(gate, texts, 1)
        assert distrusted(gate) > 0
        assert Seen(capsys, ("--gateway", gate.url)).says("gateway-stream", "announce blocks that it doesn't have")


def test_a_clear_that_was_announced_is_followed(capsys: pytest.CaptureFixture[str]) -> None:
    with front(1, mock=LARGE, router=BY_EVENTS) as (gate, served):
        texts = prompts(20)
        drive(gate, texts, 1)
        before = view(gate)["streams"][0]["batches"]
        empty(served)
        eventually(lambda: view(gate)["streams"][0]["batches"] > before)
        drive(gate, texts, 1)
        assert distrusted(gate) == 0 and view(gate)["totals"]["promises"]["broken"] == 0


def test_a_restart_without_a_clear() -> None:
    """A new process publishes from batch 0 on and never clears what the old one announced: its blocks are forgotten."""
    with front(1, mock=LARGE, router=BY_EVENTS) as (gate, served):
        texts = prompts(20)
        drive(gate, texts, 1)
        assert httpx.post(f"{served.url}/admin/kill", json={"worker": 0, "seconds": 0.2}, trust_env=False).is_success
        eventually(lambda: served.fleet.workers[0].deaths == 1 and served.fleet.workers[0].alive)
        eventually(lambda: gate.client.get("/health").status_code == 200)
        gate.complete("a prompt that none had", max_tokens=1)  # its events begin again at 0
        eventually(lambda: view(gate)["streams"][0]["restarts"] == 1)
        drive(gate, texts, 1)
        assert distrusted(gate) == 0 and view(gate)["totals"]["promises"]["missing"].get("phantom", 0) == 0


def checked(endpoint: object) -> set[str]:
    """Codes of what a checker of the stream finds, normal or not."""
    checker = Checker()
    for frame in fetch_replay(str(endpoint), 0):
        checker.frame(frame)
    return {finding.code for finding in judge(checker.facts()).findings}


def test_blocks_that_are_announced_twice(capsys: pytest.CaptureFixture[str]) -> None:
    """Stored twice and removed once, a block seems to be there still."""
    for faults, wrong in (({"repeat_events": True}, True), ({}, False)):
        with front(1, mock=SMALL, router=BY_EVENTS) as (gate, served):
            set_faults(served, **faults)
            drive(gate, prompts(8), 6)
            assert ("repeated-store" in checked(served.fleet.states()[0].streams[0].replay_endpoint)) == wrong
            assert ("gateway-promises" in Seen(capsys, ("--gateway", gate.url)).broken) == wrong

            # Evictions that are announced before an answer explain what is missing, so trust is lost on a quick machine only.
            assert wrong or distrusted(gate) == 0


def test_a_stream_that_never_removes_shows_by_itself() -> None:
    for faults, wrong in (({"never_removes": True}, True), ({}, False)):
        with fleet(workers=1, **SMALL) as served:
            (state,) = served.fleet.states()
            set_faults(served, **faults)
            for _ in range(4):
                for text in prompts(8):
                    body = {"prompt": text, "max_tokens": 1}
                    httpx.post(f"{served.url}/v1/completions", json=body, trust_env=False).raise_for_status()
            assert ("never-removes" in checked(state.streams[0].replay_endpoint)) == wrong


def test_crossed_by_the_mock_itself(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_promises, "ARRIVED", 0)
    with front(2, mock=LARGE, router={"policy": "kv"}) as (gate, served):
        set_faults(served, crossed_events=True)
        seeds = count(2)

        def named() -> bool:
            drive(gate, prompts(12, next(seeds)), 1)
            return Seen(capsys, ("--gateway", gate.url)).says("gateway-crossed", "worker0, worker1")

        eventually(named)


def test_a_healthy_engine_keeps_its_trust(capsys: pytest.CaptureFixture[str]) -> None:
    with front(2, mock=SMALL, router={"policy": "kv"}) as (gate, _):
        drive(gate, prompts(10), 4)
        assert distrusted(gate) == 0
        assert "gateway-crossed" not in Seen(capsys, ("--gateway", gate.url)).broken


@contextmanager
def crossed() -> Iterator[Gated]:
    """Two engines, each with the other's events."""
    with fleet(workers=2, engine={"num_gpu_blocks": 2000, "block_size": 16}) as served:
        states = served.fleet.states()
        engines = [
            {
                "url": state.url,
                "name": state.name,
                "model": "mock",
                "events": other.streams[0].endpoint,
                "replay": other.streams[0].replay_endpoint,
            }
            for state, other in zip(states, reversed(states), strict=True)
        ]
        with Gated(engines=engines, router={"policy": "kv"}) as gate:
            yield gate.ready(2, 2)


def test_crossed_event_ports(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_promises, "ARRIVED", 0)
    with crossed() as gate:
        seeds = count(1)

        def named() -> bool:
            drive(gate, prompts(12, next(seeds)), 1)
            return Seen(capsys, ("--gateway", gate.url)).says("gateway-crossed", "worker0, worker1")

        eventually(named)
        seen = Seen(capsys, ("--gateway", gate.url))
        assert distrusted(gate) > 0
        assert seen.says("gateway-stream", "what another engine computes")


def test_a_wrongly_reported_block_size(capsys: pytest.CaptureFixture[str]) -> None:
    large = {"num_gpu_blocks": 1000, "block_size": 64}
    with front(1, mock={"engine": large}) as (gate, served):
        (state,) = served.fleet.states()
        told = {
            "url": state.url,
            "name": "told",
            "model": "mock",
            "block_size": 16,
            "events": state.streams[0].endpoint,
        }
        with Gated(engines=[told]) as other:
            other.ready(1)
            drive(other, prompts(2), 2)
            eventually(lambda: "gateway-block-size" in Seen(capsys, ("--gateway", other.url)).broken)
            drive(other, prompts(20), 2)
            promises = view(other)["totals"]["promises"]
            assert promises["promised"] > 0 and distrusted(other) == 0, (
                "events have their own size: its blocks are right"
            )
            assert promises["missing"].get("phantom", 0) == 0, promises
        assert "gateway-block-size" not in Seen(capsys, ("--gateway", gate.url)).broken
    with Served(workers=1, engine=large) as served:  # without events, its answers tell
        engine = {"url": served.url, "name": "e", "model": "mock", "block_size": 16}
        with Gated(engines=[engine], router={"policy": "sticky", "options": {"approximate": 1}}, block_size=16) as gate:
            gate.ready(1)
            drive(gate, prompts(8), 6)
            seen = Seen(capsys, ("--gateway", gate.url))
            assert seen.says("gateway-promises", "another size"), seen.all["gateway"]["view"]["totals"]


def test_an_engine_that_sleeps_and_tiers_named_wrongly(capsys: pytest.CaptureFixture[str]) -> None:
    with fleet(workers=1) as served:
        (state,) = served.fleet.states()
        set_faults(served, asleep=True, wrong_tier=True)
        seen = Seen(capsys, (state.url, state.streams[0].endpoint, "--seconds", "1"))
        assert {"asleep", "tier-named"} <= seen.broken


def test_a_sleeping_engine_gets_no_requests_and_no_credit_until_its_stream_clears() -> None:
    with front(2, mock=LARGE, router={"policy": "kv"}) as (gate, served):
        drive(gate, prompts(8), 2)
        asleep = served.fleet.workers[0]
        asleep.faults = changed(asleep.faults, {"asleep": True})
        eventually(lambda: gate.engines()[asleep.name]["state"] == "down")
        assert "it sleeps" in gate.engines()[asleep.name]["reason"]
        eventually(lambda: distrusted(gate) > 0)
        before = gate.engines()[asleep.name]["requests"]
        drive(gate, prompts(8), 1)
        assert gate.engines()[asleep.name]["requests"] == before
        asleep.faults = changed(asleep.faults, {"asleep": False})
        eventually(lambda: gate.engines()[asleep.name]["state"] == "ready")
        assert distrusted(gate) > 0, "what it announced before it slept"
        assert httpx.post(f"{served.urls[0]}/reset_prefix_cache", trust_env=False).status_code == 200
        eventually(lambda: distrusted(gate) == 0)


def test_tiers_named_wrongly_promise_what_is_there() -> None:
    """Prefixes are found all the same, so the source keeps its trust: only their distance is wrong."""
    with front(1, mock=LARGE, router=BY_EVENTS) as (gate, served):
        set_faults(served, wrong_tier=True)
        drive(gate, prompts(20), 3)
        promises = view(gate)["totals"]["promises"]
        assert promises["promised"] > 0 and promises["broken"] == 0 and distrusted(gate) == 0


def test_few_phantoms_change_nothing() -> None:
    recent = RecentPhantoms()
    assert not any(recent.add(at % 3 != 0) for at in range(10 * ENOUGH_ANSWERS))
    recent = RecentPhantoms()
    assert [recent.add(True) for _ in range(ENOUGH_ANSWERS)] == [False] * (ENOUGH_ANSWERS - 1) + [True]
    assert not recent.add(True), "it counts anew"
    assert MockFaults().never_removes is False
