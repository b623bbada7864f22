"""Engines whose events lie: what the gateway makes of it, and what ``kvyard doctor`` names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.cli.test_doctor import Seen
from tests.server.gateway.support import Gated, eventually, fleet, front
from tests.server.mock.support import Served

from kvyard.server.gateway.promises import ENOUGH_ANSWERS, RecentPhantoms
from kvyard.server.mock.faults import MockFaults, changed

pytestmark = pytest.mark.zmq
SMALL: dict[str, Any] = {"engine": {"num_gpu_blocks": 64, "block_size": 16}}
"""A pool for three of the prompts below."""


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


def test_a_cache_that_was_emptied_without_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    with front(1, mock={"engine": {"num_gpu_blocks": 1000, "block_size": 16}}, router={"policy": "kv"}) as (
        gate,
        served,
    ):
        texts = prompts(4)
        drive(gate, texts, 1)
        set_faults(served, never_clears=True, salt_per_request=True)  # whatever it had, it finds nothing of it again
        drive(gate, texts, 6)
        seen = Seen(capsys, ("--gateway", gate.url))
        assert "gateway-promises" in seen.broken and distrusted(gate) > 0


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


def test_crossed_event_ports(capsys: pytest.CaptureFixture[str]) -> None:
    with crossed() as gate:
        texts = prompts(12)
        drive(gate, texts, 3)
        seen = Seen(capsys, ("--gateway", gate.url))
        assert seen.says("gateway-crossed", "worker0, worker1"), seen.all["gateway"]["view"]["workers"]


def test_a_block_size_that_was_told_wrongly(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_few_phantoms_change_nothing() -> None:
    recent = RecentPhantoms()
    assert not any(recent.add(at % 3 != 0) for at in range(10 * ENOUGH_ANSWERS))
    recent = RecentPhantoms()
    assert [recent.add(True) for _ in range(ENOUGH_ANSWERS)] == [False] * (ENOUGH_ANSWERS - 1) + [True]
    assert not recent.add(True), "it counts anew"
    assert MockFaults().never_removes is False
