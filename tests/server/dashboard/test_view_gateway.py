"""A gateway's dashboard agrees with its parts."""

from __future__ import annotations

from typing import Any

import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.server.dashboard.support import watched
from tests.server.gateway.support import Gated, front

from kvyard.server.dashboard import feed
from kvyard.server.gateway import view as gateway_view

pytestmark = pytest.mark.zmq


def view(gated: Gated) -> Any:
    return gated.client.get("/dashboard/view").json()


def test_decisions_streams_and_totals() -> None:
    with front(2) as (gated, _):
        prompt = list(range(170))
        reply = gated.complete(prompt, headers={"x-request-id": "mine"})
        chosen = reply.headers["x-mock-worker"]
        eventually(lambda: any(tier["idle"] >= 10 for one in view(gated)["workers"] for tier in one["tiers"]))
        gated.complete(prompt)
        gated.complete(prompt, 404, model="nobody")
        gated.idle()
        found = view(gated)
        second, first = found["decisions"]
        assert first["id"] == "mine" and first["worker"] == second["worker"] == f"{chosen}@0"
        assert (second["number"], second["blocks"], second["tiers"]["device"], second["best"]) == (2, 10, 10, 10)
        assert "least time" in second["why"] and "least-time chose" in second["said"] and second["cost"] < first["cost"]
        totals = found["totals"]
        assert totals["finished"] == 2 and totals["refused"] == 1 and totals["under_way"] == totals["failed"] == 0
        assert totals["prompts"]["device"] == 160 and sum(totals["prompts"].values()) == 340
        assert totals["output_tokens"] == 8 and totals["ttft"]["count"] == 2
        assert {one["name"]: one["state"] for one in found["workers"]} == {"worker0": "ready", "worker1": "ready"}
        assert {one["state"] for one in found["streams"]} == {"fresh"} and found["reads"] == "index"
        assert sorted(one["worker"] for one in found["streams"]) == ["worker0", "worker1"]
        assert max(one["seq"] for one in found["streams"]) >= 0


def test_cached_blocks_are_counted_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look does little, and after a few of them everybody's is known; who is gone has nothing."""
    monkeypatch.setattr(gateway_view, "AT_ONCE", 1)
    with front(3) as (gated, served):
        for url in served.urls:
            served.client.post(
                f"{url}/v1/completions", json={"prompt": list(range(320)), "max_tokens": 1}
            ).raise_for_status()

        def cached() -> dict[str, int]:
            return {one["name"]: sum(tier["idle"] for tier in one["tiers"]) for one in view(gated)["workers"]}

        eventually(lambda: all(count == 20 for count in cached().values()), cached)
        gated.post("/admin/remove", engine="worker1")
        eventually(lambda: cached() == {"worker0": 20, "worker2": 20}, cached)
        served.client.post("/reset_prefix_cache")
        eventually(lambda: cached()["worker0"] == 0 and cached()["worker2"] == 20, cached)


def test_the_gateway_ends_at_once_though_somebody_watches() -> None:
    with front(1) as (gated, _):
        with watched(gated.url) as events:
            assert [next(events)[0], next(events)[0]] == ["history", "view"]
            gated.running.stop()
            assert [name for name, _ in events][-1] == "bye"


def test_a_late_viewer_sees_earlier_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "IDLE_INTERVAL", 0.02)
    with front(1) as (gated, _):
        gated.complete("a prompt")
        gated.idle()
        eventually(lambda: view(gated)["totals"]["finished"] == 1)
        eventually(lambda: len(past_of(gated)) > 2, lambda: past_of(gated)[-3:])
        eventually(lambda: past_of(gated)[-1]["finished"] == 1, lambda: past_of(gated)[-3:])
        assert past_of(gated)[0]["finished"] == 0


def past_of(gated: Gated) -> list[dict[str, Any]]:
    """Return the past that a new viewer receives."""
    with watched(gated.url) as events:
        name, past = next(events)
        assert name == "history"
        return list(past)
