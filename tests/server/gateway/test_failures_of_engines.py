"""Engines that die, streams that break, clients that leave: nothing that hadn't begun is lost, nothing is held for ever."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.server.gateway.support import PATIENCE, Gated, cached, fleet, front, together, worker_of
from tests.server.mock.support import Process
from tests.server.support import asking

from kvyard.engine.timing import FixedTiming
from kvyard.router.journal import HeldBack, read_journal

pytestmark = pytest.mark.zmq

PROMPT = list(range(800))
SLOW = {"timing": FixedTiming(prefill_ms=20, decode_ms=20)}


def test_an_engine_that_refuses_is_left_for_another() -> None:
    with front(2, router={"policy": "round-robin"}) as (gated, served):
        assert served.client.post("/admin/faults", json={"error_rate": 1.0, "error_status": 503}).status_code == 200
        replies = [gated.complete([at] * 40) for at in range(6)]
        assert {worker_of(reply) for reply in replies} == {"worker1"}
        assert any("tries=2" in reply.headers["x-kvyard-decision"] for reply in replies)
        failed = gated.engines()["worker0"]["failed"]
        assert failed >= 1
        metrics = gated.metrics()
        assert metrics['kvyard_gateway_retries_total{model="mock"}'] >= 1
        gated.idle()


def test_a_retry_has_its_tenants_one_place_and_gives_it_back(tmp_path: Path) -> None:
    logged = tmp_path / "access.jsonl"
    settings = {"flow": {"tenant_requests": 1}, "access_log": str(logged), "journal": str(tmp_path / "journal")}
    with front(2, router={"policy": "round-robin"}, queue_seconds=PATIENCE, **settings) as (gated, served):
        assert served.client.post("/admin/faults", json={"error_rate": 1.0, "error_status": 503}).status_code == 200
        headers = {"x-gateway-inference-fairness-id": "gold"}
        replies = together([lambda: gated.complete("x" * 40, headers=headers) for _ in range(6)])
        assert {worker_of(reply) for reply in replies} == {"worker1"}
        assert any("tries=2" in reply.headers["x-kvyard-decision"] for reply in replies)
        waited = [reply for reply in replies if "flow=fifo" in reply.headers["x-kvyard-decision"]]
        assert waited
        gated.idle()
    lines = [json.loads(line) for line in logged.read_text().splitlines()]
    held = [line for line in lines if line.get("waited_because")]
    assert len(held) >= len(waited)
    assert all(line["waited_ms"] > 0 and "a tenant has 1 requests" in line["waited_because"] for line in held)
    reasons = [entry for entry in read_journal(tmp_path / "journal") if isinstance(entry, HeldBack)]
    assert {entry.why for entry in reasons} == {line["waited_because"] for line in held}


@pytest.mark.parametrize("streamed", [False, True])
def test_refused_prompts_are_not_taken_for_cached(streamed: bool) -> None:
    with front(1, router={"predicted_ttl_s": 600.0}) as (gated, _):
        gated.complete(PROMPT[:320])
        # Readable for the gateway, and more than the engine has room for.
        refused = gated.complete(PROMPT, 400, max_tokens=100_000, stream=streamed)
        assert "hit=20/50" in refused.headers["x-kvyard-decision"], "what the first one left counted"
        said = gated.post("/explain", body={"prompt": PROMPT}).json()
        assert said["hit_blocks"] == 20, "and nothing of the second one does"
        gated.idle()


def test_unserved_prompts_are_not_taken_for_cached() -> None:
    with front(2, retries=1, router={"predicted_ttl_s": 600.0}) as (gated, served):
        for url in served.urls:
            assert httpx.post(f"{url}/admin/faults", json={"error_rate": 1.0, "error_status": 503}).status_code == 200
        gated.complete(PROMPT, 503)
        assert gated.post("/explain", body={"prompt": PROMPT}).json()["hit_blocks"] == 0
        gated.idle()


def test_an_engine_that_fails_what_others_answer_is_shunned_for_a_while() -> None:
    """It says that it is well, and it is the least busy one, since it fails so fast."""
    with front(2, router={"policy": "least-loaded"}, shun_seconds=60.0) as (gated, served):
        served.client.post("/admin/faults", json={"error_rate": 1.0, "error_status": 500})

        def shunned() -> bool:
            gated.complete("x")
            return bool(gated.engines()["worker0"]["state"] == "down")

        eventually(shunned)
        before = gated.engines()["worker0"]["requests"]
        assert "others answered" in gated.engines()["worker0"]["reason"]
        for _ in range(5):
            assert worker_of(gated.complete("x")) == "worker1"
        assert gated.engines()["worker0"]["requests"] == before
        gated.idle()


def test_a_request_that_nobody_can_answer_is_nobodys_fault() -> None:
    with front(2) as (gated, _):
        for _ in range(6):
            gated.complete("x", 500, headers={"x-mock-fault": "error=500"})
        assert {one["state"] for one in gated.engines().values()} <= {"ready", "suspect"}
        assert gated.gateway.traffic.counters.failed == 6
        gated.idle()


@pytest.mark.parametrize("streamed", [True, False])
def test_a_worker_that_dies_over_a_prompt_is_no_loss(streamed: bool) -> None:
    with front(2) as (gated, served):
        gated.post("/admin/drain", engine="worker1")
        served.post("/admin/stall", seconds=30)

        def kill() -> None:
            eventually(lambda: gated.gateway.members.engines["worker0"].in_flight)
            gated.post("/admin/resume", engine="worker1")
            httpx.post(f"{served.urls[1]}/admin/kill", json={"worker": 0}, trust_env=False)

        answered, _ = together([lambda: gated.complete(PROMPT, stream=streamed), kill])
        assert isinstance(answered, httpx.Response), answered
        assert worker_of(answered) == "worker1" and "tries=2" in answered.headers["x-kvyard-decision"]
        gated.idle()


def test_a_cut_in_the_middle_is_not_tried_again() -> None:
    with front(2, mock={"engine": SLOW}) as (gated, served):
        for url in served.urls:
            httpx.post(f"{url}/admin/faults", json={"abort_rate": 1.0, "abort_after": 3}, trust_env=False)
        text = ""
        with pytest.raises(httpx.RemoteProtocolError), gated.stream("x", max_tokens=50) as reply:
            for part in reply.iter_text():
                text += part
        events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line]
        assert events[0]["choices"] and events[-1]["error"]["code"] == 502
        gated.idle()
        assert gated.gateway.traffic.counters.broken == 1
        assert sum(one["requests"] for one in gated.engines().values()) == 1


def test_a_dead_worker_and_its_return() -> None:
    """A killed worker gets nothing more. Back with an empty cache it gets requests again, and isn't credited with anything."""
    with front(2) as (gated, served):
        first = worker_of(gated.complete(PROMPT))
        eventually(lambda: gated.post("/explain", body={"prompt": PROMPT}).json()["hit_blocks"] == 49)
        number = int(first.removeprefix("worker"))
        other = served.urls[1 - number]
        httpx.post(f"{other}/admin/kill", json={"worker": number}, trust_env=False)
        eventually(lambda: gated.engines()[first]["state"] == "down")
        moved = gated.complete(PROMPT)
        assert worker_of(moved) != first and cached(moved) == 0
        httpx.post(f"{other}/admin/revive", json={"worker": number}, trust_env=False)
        gated.ready(2)

        def emptied() -> bool:
            said = gated.post("/explain", body={"prompt": PROMPT}).json()
            found = {one["worker"].partition("@")[0]: one["tiers"]["device"] for one in said["candidates"]}
            return found == {first: 0, f"worker{1 - number}": 49}

        eventually(emptied, lambda: gated.post("/explain", body={"prompt": PROMPT}).json())
        assert gated.metrics()[f'kvyard_gateway_engine_downs_total{{engine="{first}",model="mock"}}'] >= 1
        gated.idle()


def test_nobody_is_up_for_a_while() -> None:
    """Requests wait for an engine that comes back."""
    with fleet(workers=2) as served:
        with Gated(engines=[{"url": served.urls[0], "name": "only"}]) as gated:
            gated.ready(1)
            httpx.post(f"{served.urls[1]}/admin/kill", json={"worker": 0}, trust_env=False)
            eventually(lambda: gated.client.get("/health").status_code == 503)

            def revive() -> None:
                eventually(lambda: len(gated.gateway.members.pools["mock"].waiting) == 5)
                httpx.post(f"{served.urls[1]}/admin/revive", json={"worker": 0}, trust_env=False)

            *found, _ = together([*(lambda: gated.complete("hello") for _ in range(5)), revive])
            assert all(isinstance(reply, httpx.Response) for reply in found), found
            gated.idle()


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_hangs_up_ends_the_engines_work(streamed: bool) -> None:
    with front(1, mock={"engine": SLOW}) as (gated, served):
        body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": streamed}

        def running() -> int:
            return int(served.get("/admin/workers")[0]["running"])

        if streamed:
            with gated.client.stream("POST", "/v1/completions", json=body) as reply:
                parts = reply.iter_raw()  # kept: once it is gone, so is the connection
                next(parts)
                assert running() == 1
        else:
            with asking(gated.url, "/v1/completions", **body):
                eventually(lambda: running() == 1)
        eventually(lambda: running() == 0)
        gated.idle()
        assert gated.gateway.traffic.counters.cancelled == 1 and gated.gateway.traffic.counters.failed == 0
        assert gated.engines()["worker0"]["state"] == "ready"
        served.check()


def test_events_that_are_lost_earn_nothing() -> None:
    """I12: a stream with a gap that can't be mended isn't believed; once it is whole again it is."""
    with (
        fleet(workers=2, replay_endpoint=None) as served,
        Gated(fleets=[served.url], router={"predicted_ttl_s": 0}) as gated,
    ):
        gated.ready(2)

        def streams_are_fresh() -> bool:
            # Nothing can be replayed here, so a subscription that came after a first batch is whole only after a clear.
            for url in served.urls:
                httpx.post(f"{url}/reset_prefix_cache", trust_env=False)
            return all(one["state"] == "fresh" for engine in gated.engines().values() for one in engine["streams"])

        eventually(streams_are_fresh, gated.engines)
        first = gated.complete(PROMPT)
        number = int(worker_of(first).removeprefix("worker"))

        def hits() -> int:
            return int(gated.post("/explain", body={"prompt": PROMPT}).json()["hit_blocks"])

        eventually(lambda: hits() == 49)
        url = served.urls[number]
        httpx.post(f"{url}/admin/faults", json={"event_loss": 1.0}, trust_env=False)
        httpx.post(f"{url}/v1/completions", json={"prompt": [7] * 100, "max_tokens": 1}, trust_env=False)
        eventually(lambda: served.fleet.workers[number].tally.streams[0].withheld)
        httpx.post(f"{url}/admin/faults", json={"event_loss": 0.0}, trust_env=False)
        httpx.post(f"{url}/v1/completions", json={"prompt": [8] * 100, "max_tokens": 1}, trust_env=False)
        eventually(lambda: hits() == 0)
        states = {one["state"] for one in gated.engines()[f"worker{number}"]["streams"]}
        assert states <= {"stale", "catching up"}
        eventually(lambda: gated.client.get("/health").json()["status"] == "degraded")
        health = gated.client.get("/health")
        assert health.status_code == 200 and {one["code"] for one in health.json()["reasons"]} == {"stream-stale"}
        gated.idle()


@pytest.mark.parametrize("policy", ["kv", pytest.param("round-robin", marks=pytest.mark.slow)])
def test_a_process_killed_under_load(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    """kill -9 in the middle: what hadn't begun to stream is answered by others, what had ends with an error, nothing hangs."""
    arguments = ("--kv-events", "--timing", "fixed:4,3", "--max-model-len", "4096")
    with Process(*arguments) as victim, Process(*arguments) as second, Process(*arguments) as third:
        processes = [victim, second, third]
        engines = []
        for at, process in enumerate(processes):
            (url,) = process.urls()
            (state,) = httpx.get(f"{url}/admin/workers", trust_env=False).json()
            stream = state["streams"][0]
            engines.append(
                {"url": url, "name": f"p{at}", "events": stream["endpoint"], "replay": stream["replay_endpoint"]}
            )
        with Gated(engines=engines, router={"policy": policy}) as gated:
            gated.ready(3, 3)
            stop = threading.Event()
            done: list[tuple[str, bool, str]] = []
            """How each ended, whether anything had come, and why not otherwise."""
            lock = threading.Lock()

            def load(number: int) -> None:
                turn = 0
                with httpx.Client(base_url=gated.url, timeout=PATIENCE, trust_env=False) as client:
                    while not stop.is_set():
                        turn += 1
                        prompt = [number, turn] * 30
                        body = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "stream": turn % 3 > 0}
                        note = one(client, body)
                        with lock:
                            done.append(note)

            def one(client: httpx.Client, body: dict[str, Any]) -> tuple[str, bool, str]:
                begun = False
                try:
                    with client.stream("POST", "/v1/completions", json=body) as reply:
                        text = b""
                        for part in reply.iter_raw():
                            begun = True
                            text += part
                        if reply.status_code != 200:
                            return "refused", False, text.decode()[:300]
                        whole = text.endswith(b"data: [DONE]\n\n") or not body["stream"]
                        return "whole" if whole else "cut", begun, text.decode()[-300:]
                except httpx.HTTPError as error:
                    return "cut", begun, repr(error)

            threads = [threading.Thread(target=load, args=(number,)) for number in range(12)]
            for thread in threads:
                thread.start()
            eventually(lambda: len(done) > 30)
            began = time.monotonic()
            os.kill(victim.process.pid, signal.SIGKILL)
            eventually(lambda: gated.gateway.members.engines["p0"].state == "down")
            noticed = time.monotonic() - began
            after = len(done)
            eventually(lambda: len(done) > after + 60)
            stop.set()
            for thread in threads:
                thread.join(PATIENCE)
                assert not thread.is_alive()
            lost = [note for note in done if note[0] != "whole" and not note[1]]
            cut = [note for note in done if note[0] == "cut" and note[1]]
            assert not lost, lost[:5]
            assert len(cut) <= 12
            with capsys.disabled():
                retried = gated.gateway.traffic.counters.retried
                print(
                    f"\n{policy}: worker killed with -9 among {len(done)} requests: none lost that had not begun, {len(cut)} "
                    f"cut while streaming, {retried} tried again, noticed after {noticed * 1000:.0f} ms"
                )
            gated.idle()
