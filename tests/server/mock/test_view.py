"""The mock's dashboard agrees with what happened."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest
from tests.server.dashboard.support import Fixed, everything, watched
from tests.server.mock.support import LOOPBACK, Served
from tests.waiting import eventually

from kvyard.tiers import OffloadConfig, TierConfig

SECRET = "the quick brown fox, whom nobody shall see"


def view(served: Served) -> Any:
    return served.get("/dashboard/view")


def test_counts_add_up() -> None:
    with Served(workers=2, events_endpoint=LOOPBACK) as served:
        prompt = list(range(100))
        for _ in range(3):
            served.complete(prompt, max_tokens=5)
        served.complete(prompt, 404, model="nobody")
        served.complete(prompt, 503, headers={"X-Mock-Fault": "error=503"})
        found = view(served)
        totals = found["totals"]
        assert (totals["requests"], totals["finished"], totals["refused"], totals["failed"]) == (3, 3, 1, 1)
        assert totals["prompt_tokens"] == 300 and totals["output_tokens"] == 15 and totals["under_way"] == 0
        # Two of three prompts were there but for the open block.
        assert totals["prompts"] == {
            "device": 192,
            "host": 0,
            "storage": 0,
            "remote": 0,
            "object": 0,
            "elsewhere": 0,
            "computed": 108,
        }
        assert totals["ttft"]["count"] == 3 and totals["ttft"]["p50"] > 0
        here, other = found["workers"]
        assert here["requests"] == 5 and here["prompts"] == totals["prompts"] and other["requests"] == 0
        assert here["url"] == served.urls[0] and here["model"] == "mock" and here["state"] == "ready"
        (device,) = here["tiers"]
        assert device["capacity"] == 512 and device["held"] == 0 and device["idle"] >= 6
        first, *_ = found["decisions"]
        assert (
            first["number"] == 3 and first["tiers"]["device"] == 6 and first["blocks"] == 6 and first["tokens"] == 100
        )
        assert "Found 96 on the device, and 4 of 100 tokens have to be computed." in first["said"]
        stream, silent = found["streams"]
        assert eventually(lambda: view(served)["streams"][0]["seq"] >= 0)
        assert stream["state"] == "sending" and stream["worker"] == "worker0"
        assert silent["seq"] == -1 and silent["age_s"] is None


def test_nothing_of_a_request_is_shown() -> None:
    with Served() as served:
        served.complete(SECRET)
        text = served.client.get("/dashboard/view").text
        assert "fox" not in text and "quick" not in text and '"tokens":42' in text


def test_tiers_and_transfers() -> None:
    host = OffloadConfig(tiers=(TierConfig(num_blocks=256),))
    engine = {"num_gpu_blocks": 64, "tiers": host, "bytes_per_block": 1 << 16}
    with Served(engine=engine) as served:
        for number in range(8):
            served.complete([number] * 320)
        eventually(lambda: view(served)["transfers"][0]["under_way"] == 0)
        # Pushed off the device by the others, and still in host memory.
        assert served.cached([0] * 320) >= 304
        found = view(served)
        device, host = found["workers"][0]["tiers"]
        assert (device["name"], host["name"], host["capacity"]) == ("G1", "G2", 256)
        assert host["idle"] + host["held"] >= 8 * 20
        assert found["totals"]["prompts"]["host"] >= 300
        stores, loads = found["transfers"]
        assert (stores["source"], stores["target"], loads["source"], loads["target"]) == ("G1", "G2", "G2", "G1")
        assert stores["landed"] >= 8 and stores["bytes"] > 0 and loads["landed"] == 1


def test_states_faults_and_a_second_life() -> None:
    with Served(workers=2, events_endpoint=LOOPBACK, engine={"num_gpu_blocks": 512}) as served:
        served.complete("a prompt that is long enough for a block")
        served.post("/admin/faults", event_loss=0.25)
        served.post("/admin/kill", worker=1)
        eventually(lambda: [one["state"] for one in view(served)["workers"]] == ["ready", "down"])
        found = view(served)
        assert "revive" in found["workers"][1]["reason"]
        assert found["notes"] == ["worker0: event_loss = 0.25"]
        assert [one["worker"] for one in found["streams"]] == ["worker0"]
        served.post("/admin/revive", worker=1)
        found = view(served)
        assert [one["state"] for one in found["workers"]] == ["ready", "ready"]
        assert found["streams"][1]["restarts"] == 1
        served.post("/admin/stall", worker=0, seconds=30)
        assert view(served)["workers"][0]["state"] == "stalled"
        assert view(served)["totals"]["finished"] == 1
        served.inside(served.fleet.workers[0].driver.thaw)


def test_lost_events_are_counted_by_those_who_lose_them() -> None:
    with Served(events_endpoint=LOOPBACK) as served:
        served.post("/admin/faults", event_loss=1.0)
        served.complete("a prompt that is long enough for a block")
        lost = eventually(lambda: view(served)["streams"][0]["missed"])
        assert lost >= 1 and view(served)["streams"][0]["batches"] == 0


def test_every_port_shows_the_fleet_and_a_death_takes_its_viewers() -> None:
    with Served(workers=2) as served:
        with watched(served.urls[1]) as events:
            next(events)
            assert len(next(events)[1]["workers"]) == 2
            served.post("/admin/kill", worker=1)
            try:
                for _ in events:
                    pass
            except httpx.TransportError:
                pass
        eventually(lambda: served.fleet.dashboard.feed.viewers == 0)
        assert served.client.get("/dashboard").status_code == 200


@pytest.mark.slow
def test_a_viewer_that_reads_nothing_is_reset() -> None:
    with Served(workers=2) as served:
        dashboard = served.fleet.dashboard
        dashboard.slow, dashboard.feed._interval = 0.3, 0.02
        dashboard.feed.source = Fixed(everything(workers=300)).view  # more than sockets hold for those who don't read
        port = served.fleet.ports[1].port
        with socket.socket() as idle, watched(served.url) as events:
            idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            idle.connect(("127.0.0.1", port))
            idle.sendall(b"GET /dashboard/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            next(events)
            eventually(lambda: dashboard.feed.viewers == 2)
            eventually(lambda: dashboard.feed.viewers == 1)
            # Gone from the server's books too: nothing waits for it at the end.
            eventually(lambda: not served.fleet.ports[1]._server.server_state.connections)
            assert next(events)[0] in ("view", "history")


def test_the_dashboards_history_is_kept_from_the_start() -> None:
    with Served() as served:
        assert "dashboard" in {task.name for task in served.fleet.supervisor.tasks}
