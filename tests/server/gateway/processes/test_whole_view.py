"""Gateways that are processes to each other: loads, limits, breakers, changes, responses and figures are one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.server.gateway.processes.support import HubThread, joined, several
from tests.server.gateway.scripted_engine import ScriptedEngine, answer
from tests.server.gateway.support import Gated, fleet, together

from kvyard.clock import VirtualClock
from kvyard.engine.timing import FixedTiming
from kvyard.errors import KvyardError
from kvyard.server.gateway.access_log import AccessLog
from kvyard.server.gateway.config import GatewayConfig, GatewayEngine, NameConfig
from kvyard.server.gateway.gateway import Gateway
from kvyard.server.gateway.processes.changes import EngineChange, KeptChanges
from kvyard.server.gateway.processes.frames import HUB, FrameKind, frame
from kvyard.server.gateway.processes.hub import Hub
from kvyard.server.gateway.recording import TrafficRecorder

pytestmark = pytest.mark.zmq

SAID = b'{"choices":[],"usage":{"prompt_tokens":30,"completion_tokens":10}}'


class Held:
    """An engine that answers when it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self, head: str, body: bytes) -> Sequence[bytes]:
        self.go.wait(30)
        return [answer("200 OK", SAID)]


def booked(gated: Gated) -> int:
    """How many requests a gateway takes to be under way, its own and others'."""
    (pool,) = gated.gateway.members.pools.values()
    return len(pool.router.loads.active)


def test_load_counts_everywhere_and_goes_with_its_process() -> None:
    engine = Held()
    with ScriptedEngine(engine) as scripted:
        settings: dict[str, Any] = {"engines": [{"url": scripted.url, "name": "e"}], "engine_requests": 3}
        with several(2, **settings) as (gateways, between):
            a, b = (gated.ready(1) for gated in gateways)
            statuses: list[int] = []

            def ask(gated: Gated) -> threading.Thread:
                thread = threading.Thread(target=lambda: statuses.append(gated.complete("x").status_code))
                thread.start()
                return thread

            threads = [ask(a), ask(a)]
            eventually(lambda: booked(a) == booked(b) == 2)
            threads += [ask(b)]
            eventually(lambda: booked(a) == booked(b) == 3)
            # The engine has as much as it may have, though neither process sent it that much: the next ones wait.
            threads += [ask(a), ask(b)]
            eventually(lambda: a.client.get("/health").json()["queued"] == 2)
            for gated in gateways:
                health = gated.client.get("/health").json()
                assert (health["under_way"], health["engines"]) == (5, {"ready": 1})
                (told,) = gated.client.get("/admin/engines").json()
                assert (told["in_flight"], told["state"]) == (3, "ready")
            # A third that comes later is told of all of it, and what it has is gone with it.
            channel = between.join(3, 3)
            with Gated(channel=channel, **settings) as c:
                eventually(lambda: booked(c.ready(1)) == 3)
            between.do(lambda: between.hub.remove(3))
            engine.go.set()
            for thread in threads:
                thread.join()
            assert statuses == [200] * 5
            eventually(lambda: booked(a) == booked(b) == 0)
            for gated in gateways:
                gated.idle()


@pytest.mark.slow
def test_a_lost_process_takes_its_bookings_along() -> None:
    engine = Held()
    with ScriptedEngine(engine) as scripted:
        settings: dict[str, Any] = {"engines": [{"url": scripted.url, "name": "e"}]}
        with several(1, **settings) as ((a,), between):
            a.ready(1)
            channel = between.join(2, 2)
            with Gated(channel=channel, **settings) as b:
                thread = threading.Thread(
                    target=lambda: b.ready(1).client.post("/v1/completions", json={"prompt": "x"})
                )
                thread.start()
                eventually(lambda: booked(a) == 1)
                between.do(lambda: between.hub.remove(2))  # as when it is killed
                eventually(lambda: booked(a) == 0)
                engine.go.set()
                thread.join()
            assert a.complete("x").status_code == 200


def test_rates_hold_for_all_together(tmp_path: Path) -> None:
    """No more is let in than by one process, however fast it comes to all of them."""
    keys = tmp_path / "keys.toml"
    keys.write_text(
        '[[keys]]\nname = "a"\nkey = "sk-a"\nrequests_per_minute = 20\n'
        '[[keys]]\nname = "b"\nkey = "sk-b"\ntokens_per_minute = 10\n'
    )
    with ScriptedEngine(lambda head, body: [answer("200 OK", SAID)]) as scripted:
        with several(3, engines=[{"url": scripted.url}], keys_file=str(keys)) as (gateways, _):
            statuses: list[int] = []
            a, b = ({"authorization": f"Bearer sk-{name}"} for name in "ab")

            def ask(gated: Gated) -> None:
                for _ in range(12):
                    reply = gated.client.post("/v1/completions", json={"prompt": "x"}, headers=a)
                    statuses.append(reply.status_code)
                    assert reply.headers["x-ratelimit-limit-requests"] == "20"

            for gated in gateways:
                gated.ready(1)
            began = time.monotonic()
            together([partial(ask, gated) for gated in gateways])
            took = time.monotonic() - began
            assert statuses.count(429) + statuses.count(200) == 36
            assert 20 <= statuses.count(200) <= 20 + took / 3 + 1, "one more for each three seconds that this took"
            # The tokens of an answer are settled after it was sent, and then leave nothing for any process.
            gateways[1].complete("x", headers=b)
            later = gateways[2].client
            eventually(lambda: later.post("/v1/completions", json={"prompt": "x"}, headers=b).status_code == 429)
            refused = gateways[0].metrics()['kvyard_gateway_key_refused_total{key="a"}']
            assert refused == statuses.count(429)


def test_a_change_holds_whichever_process_ends() -> None:
    with ScriptedEngine(lambda head, body: [answer("200 OK", SAID)]) as scripted:
        engines = [{"url": scripted.url, "name": name} for name in "ef"]
        settings: dict[str, Any] = {"engines": engines, "tokenizer": "bytes"}
        with several(2, **settings) as (gateways, between):
            a, b = (gated.ready(2) for gated in gateways)
            # One that was told that it is made: the hub has it by then.
            a.post("/admin/drain", engine="e")
            # And one by a process that ends before it could make it: another has.
            ours, theirs = socket.socketpair()
            between.do(lambda: between.hub.add(3, ours))
            theirs.sendall(frame(FrameKind.CHANGE, HUB, msgspec.msgpack.encode(EngineChange(op="drain", engine="f"))))
            theirs.close()
            eventually(lambda: b.gateway.members.engines["f"].draining)
            b.post("/admin/resume", engine="e")  # by then it has said so: what it says is heard in order
            between.do(lambda: between.hub.remove(3))
            with joined(between, 3, 3, **settings) as c:
                members = c.gateway.members.engines
                assert {name: one.draining for name, one in members.items()} == {"e": False, "f": True}


def test_late_reports_change_nothing() -> None:
    kept, add = KeptChanges(), EngineChange(op="drain", engine="e", number=1)
    resume = EngineChange(op="resume", engine="e", number=2)
    for change in (add, resume):
        kept.begun(1, change)
        kept.made(1, change)
    kept.made(1, add)  # by a slower process
    assert kept.listed() == []
    kept.begun(2, add)
    kept.made(2, add)
    assert kept.listed() == [add]


@pytest.mark.slow
def test_changes_by_operators_hold_for_all() -> None:
    with ScriptedEngine(lambda head, body: [answer("200 OK", SAID)]) as scripted:
        settings: dict[str, Any] = {"engines": [{"url": scripted.url, "name": "e"}]}
        with several(2, **settings) as (gateways, between):
            a, b = (gated.ready(1) for gated in gateways)
            a.post("/admin/engines", 201, url=scripted.url, name="f")
            b.post("/admin/engines", 409, url=scripted.url, name="f")
            eventually(lambda: set(b.gateway.members.engines) == {"e", "f"})
            b.post("/admin/drain", engine="f")
            b.post("/admin/remove", engine="e")
            b.post("/admin/remove", 404, engine="e")
            eventually(lambda: {name: one["draining"] for name, one in a.engines().items()} == {"f": True})
            # One that is started later makes the same changes, before it serves.
            with joined(between, 3, 3, **settings) as c:
                members = c.gateway.members.engines
                assert {name: one.draining for name, one in members.items()} == {"f": True}
            a.post("/admin/resume", engine="f")
            eventually(lambda: not b.gateway.members.engines["f"].draining)


@pytest.mark.slow
def test_an_engine_that_fails_in_one_process_fails_in_all() -> None:
    gone = ScriptedEngine(lambda head, body: [answer("200 OK", SAID)])
    gone.hangs_up = True  # so that no connection outlives it
    with ScriptedEngine(lambda head, body: [answer("200 OK", SAID)]) as scripted:
        engines = [{"url": scripted.url, "name": "good"}]
        slow = {"health_seconds": 3000.0, "recovery_seconds": 3000.0}  # no look finds it out
        with several(2, engines=engines, router={"policy": "round-robin"}, **slow) as (gateways, _):
            with gone:
                a, b = gateways
                a.post("/admin/engines", 201, url=gone.url, name="gone")
                for gated in gateways:
                    members = gated.gateway.members
                    eventually(lambda members=members: members.engines["gone"].up)
            host, _, port = gone.url.removeprefix("http://").partition(":")
            with contextlib.suppress(OSError):
                socket.create_connection((host, int(port))).close()  # it was waiting for one more
            for _ in range(2):
                assert a.complete("x").status_code == 200
            # By number: a look over a connection from before may take it for well again.
            eventually(lambda: all(one.gateway.members.engines["gone"].downs for one in gateways))
            assert b.gateway.members.engines["gone"].requests == 0, "it was told, and didn't find out"


@pytest.mark.slow
def test_a_response_is_found_by_all(tmp_path: Path) -> None:
    def keeper(head: str, body: bytes) -> Sequence[bytes]:
        return [answer("200 OK", json.dumps({"id": "resp_1", "head": head.split(" ")[1]}).encode())]

    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkey = "sk-a"\n[[keys]]\nname = "b"\nkey = "sk-b"\n')
    with ScriptedEngine(keeper) as scripted:
        with several(2, engines=[{"url": scripted.url}], keys_file=str(keys)) as (gateways, _):
            one, other = (gated.ready(1) for gated in gateways)
            a, b = ({"authorization": f"Bearer sk-{name}"} for name in "ab")
            one.post("/v1/responses", headers=a, model="odd", input="x")
            assert other.client.get("/v1/responses/resp_1", headers=a).status_code == 200
            assert other.client.get("/v1/responses/resp_1", headers=b).status_code == 404
            assert other.client.get("/v1/responses/resp_2", headers=a).status_code == 404


@pytest.mark.slow
def test_figures_are_those_of_all() -> None:
    timing = {"engine": {"timing": FixedTiming(prefill_ms=1, decode_ms=1)}}
    with fleet(workers=2, **timing) as served, several(2, fleets=[served.url]) as (gateways, between):
        a, b = (gated.ready(2, 2) for gated in gateways)
        prompt = "a prompt of some blocks, so that something is cached of it " * 4
        for gated in (a, b, a):
            gated.complete(prompt)
        done = 'kvyard_gateway_requests_total{model="mock",outcome="finished"}'
        counts = 'kvyard_gateway_request_seconds_count{model="mock"}'
        for gated in gateways:
            found = gated.metrics()
            assert (found[done], found[counts], found["kvyard_gateway_processes"]) == (3, 3, 2)
            assert found['kvyard_gateway_process_requests_total{process="1"}'] == 2
            assert (found["kvyard_gateway_under_way"], found["kvyard_gateway_degraded"]) == (0, 0)
            view = gated.client.get("/dashboard/view").json()
            assert (view["totals"]["finished"], view["totals"]["ttft"]["count"], len(view["decisions"])) == (3, 3, 3)
            assert sum(worker["requests"] for worker in view["workers"]) == 3
        # Every process has the whole index: it is counted once.
        stored = [value for name, value in found.items() if name.startswith("kvyard_index_feed_stored_blocks_total")]
        (model,) = a.gateway.index.models.values()
        assert sum(stored) == sum(feed.counters.stored for _, feed in model.indexer.feeds())
        # Of one that ended, its counters stay.
        between.do(lambda: between.hub.remove(2))
        eventually(lambda: a.metrics()["kvyard_gateway_processes"] == 1)
        assert (a.metrics()[done], a.metrics()["kvyard_gateway_degraded"]) == (3, 1)
        health = a.client.get("/health").json()
        assert [one["code"] for one in health["reasons"]] == ["process-missing"] and health["ready"]


@pytest.mark.slow
def test_one_file_is_written_for_all(tmp_path: Path) -> None:
    clock = VirtualClock()
    recorder = TrafficRecorder(tmp_path / "t.jsonl", clock=clock)
    hub = Hub(2, recorder, clock, AccessLog(str(tmp_path / "a.jsonl")))
    settings = {"record": str(tmp_path / "t.jsonl"), "access_log": str(tmp_path / "a.jsonl")}
    with fleet(workers=1) as served, several(2, hub, fleets=[served.url], **settings) as (gateways, _):
        for gated in gateways:
            gated.ready(1, 1)
        for turn in range(4):
            gateways[turn % 2].complete("the same prompt for all of them, with some length to it")
        assert gateways[0].metrics()["kvyard_gateway_recorded_requests_total"] == 4
    rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert [row["hash_ids"] for row in rows] == [rows[0]["hash_ids"]] * 4, "ids are of one file"
    assert [row["timestamp"] for row in rows] == sorted(row["timestamp"] for row in rows)
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 4


def test_one_that_is_started_again_begins_with_what_is_in_force() -> None:
    """As read again since, whether or not the file can still be read; and its engines are known before it takes requests."""
    with (
        ScriptedEngine(lambda head, body: [answer("200 OK", SAID)]) as old,
        ScriptedEngine(lambda head, body: [answer("200 OK", SAID)]) as new,
    ):
        settings: dict[str, Any] = {"engines": [{"url": old.url, "name": "old"}], "retries": 1}
        with HubThread(Hub(2)) as between, contextlib.ExitStack() as stack:
            first = Gated(channel=between.join(1, 2), **settings)
            reloading = first.gateway.reloading
            reloading.files.append(os.devnull)  # so that it is watched
            now = {"engines": [GatewayEngine(url=new.url, name="new")], "retries": 2}
            reloading.read = reads = lambda: msgspec.structs.replace(reloading.config, **now)
            stack.enter_context(first)
            between.do(between.hub.reload)
            eventually(lambda: list(first.gateway.members.engines) == ["new"])

            def broken() -> GatewayConfig:
                raise KvyardError("it isn't there")

            for read in (reads, broken):
                channel = between.join(2, 2)
                second = Gated(channel=channel, **settings)
                second.gateway.reloading.read = read
                second.gateway.follow()
                with second:
                    (engine,) = second.gateway.members.engines.values()
                    assert (engine.name, engine.state) == ("new", "ready")
                    assert (second.gateway.config.retries, second.gateway.reloading.reloads) == (2, 0)
                    assert second.gateway.reloading.error == ("it isn't there" if read is broken else "")
                between.do(lambda: between.hub.remove(2))


def test_a_process_knows_its_engines_before_it_takes_requests() -> None:
    with ScriptedEngine(lambda head, body: [answer("200 OK", SAID)]) as engine:
        with several(1, engines=[{"url": engine.url}]) as ((gated,), _):
            assert gated.complete("x").status_code == 200


def test_one_that_is_started_again_waits_for_engines_that_are_looked_for() -> None:
    with ScriptedEngine(lambda head, body: [answer("200 OK", SAID)]) as engine:
        host, _, port = engine.url.removeprefix("http://").partition(":")
        gateway = Gateway(GatewayConfig(names=[NameConfig(host=host, port=int(port))], tokenizer="bytes"))
        gateway.follow()

        async def begun() -> list[str]:
            async with gateway:
                return [one.state for one in gateway.members.engines.values()]

        assert asyncio.run(begun()) == ["ready"]
