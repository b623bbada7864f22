"""Models, adapters, ranks and sessions: which engines there are, and which may take a request."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import msgspec
import pytest
from tests.waiting import eventually

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.server.gateway.scripted_engine import ScriptedEngine, answer, gated, plain
from tests.server.gateway.support import PATIENCE, Gated, cached, fleet, front, worker_of

from kvyard.engine.timing import FixedTiming
from kvyard.errors import KvyardError
from kvyard.server.gateway.config import GatewayEngine, convert
from kvyard.server.gateway.routes import build
from kvyard.server.mock.config import Lora

pytestmark = pytest.mark.zmq
PROMPT = list(range(300))
PACE = {"timing": FixedTiming(prefill_ms=5, decode_ms=5)}


def test_two_models() -> None:
    with fleet(served_model_name="alpha") as first, fleet(workers=2, served_model_name="beta") as second:
        beta = [
            {
                "url": one["url"],
                "name": f"b{at}",
                "events": one["streams"][0]["endpoint"],
                "replay": one["streams"][0]["replay_endpoint"],
            }
            for at, one in enumerate(second.get("/admin/workers"))
        ]
        with Gated(fleets=[first.url], engines=beta) as gated:
            gated.ready(3, 3)
            models = gated.client.get("/v1/models").json()["data"]
            assert {one["id"] for one in models} == {"alpha", "beta"}
            assert all(abs(time.time() - one["created"]) < 3600 for one in models), "in seconds since 1970"
            for _ in range(4):
                assert gated.complete(PROMPT, model="alpha").json()["model"] == "alpha"
                assert gated.complete(PROMPT, model="beta").json()["model"] == "beta"
            assert {name: one["pool"] for name, one in gated.engines().items()} == {
                "worker0": "alpha",
                "b0": "beta",
                "b1": "beta",
            }
            said = gated.complete(PROMPT, 400).json()["error"]
            assert said["param"] == "model" and "several" in said["message"]
            assert gated.complete(PROMPT, 404, model="gamma").json()["error"]["type"] == "NotFoundError"
            gated.idle()


def test_adapters_go_to_who_has_them_and_share_nothing() -> None:
    lora = {"loras": (Lora(name="poet", path="/poet"),)}
    with front(2, mock=lora) as (gated, served):
        assert {one["id"]: one["parent"] for one in gated.client.get("/v1/models").json()["data"]} == {
            "mock": None,
            "poet": "mock",
        }
        first = gated.complete(PROMPT, model="poet")

        def hit(model: str) -> int:
            return int(gated.post("/explain", body={"prompt": PROMPT, "model": model}).json()["hit_blocks"])

        eventually(lambda: hit("poet") == 18)
        assert hit("mock") == 0
        again = gated.complete(PROMPT, model="poet")
        assert worker_of(again) == worker_of(first) and cached(again) == 288
        # One worker loses the adapter: as soon as that is known, only the other one is asked.
        number = int(worker_of(first).removeprefix("worker"))
        unload = {"lora_name": "poet"}
        httpx.post(f"{served.urls[number]}/v1/unload_lora_adapter", json=unload, trust_env=False)
        eventually(lambda: "poet" not in gated.engines()[f"worker{number}"]["models"])
        for _ in range(3):
            assert worker_of(gated.complete(PROMPT, model="poet")) == f"worker{1 - number}"
        said = gated.post("/explain", body={"prompt": PROMPT, "model": "poet"}).json()
        assert said["not_considered"] == {f"worker{number}": "it doesn't serve poet"}
        gated.idle()


def test_a_salt_sets_prompts_apart() -> None:
    with front(1) as (gated, _):
        gated.complete(PROMPT, cache_salt="a")

        def hit(**more: str) -> int:
            return int(gated.post("/explain", body={"prompt": PROMPT, **more}).json()["hit_blocks"])

        eventually(lambda: hit(cache_salt="a") == 18)
        assert hit() == 0 and hit(cache_salt="b") == 0


def test_ranks_are_chosen_one_by_one() -> None:
    with front(1, mock={"dp_size": 3}) as (gated, _):
        ranks = set()
        for at in range(9):
            prompt = [at] * 64
            reply = gated.complete(prompt)
            ranks.add(reply.headers["x-mock-rank"])
            assert f"worker=worker0@{reply.headers['x-mock-rank']};" in reply.headers["x-kvyard-decision"]
            again = gated.complete(prompt)
            assert again.headers["x-mock-rank"] == reply.headers["x-mock-rank"] and cached(again) == 48
        assert ranks == {"0", "1", "2"}


def test_sessions_stay() -> None:
    with front(3, router={"policy": "affinity", "fallback": "round-robin"}) as (gated, _):
        homes = {name: worker_of(gated.complete("x", headers={"x-session-id": name})) for name in "abc"}
        assert len(set(homes.values())) == 3
        for name, home in homes.items():
            for _ in range(3):
                reply = gated.complete("x", headers={"x-session-id": name})
                assert worker_of(reply) == home and "why=session" in reply.headers["x-kvyard-decision"]
        gated.post("/admin/drain", engine=homes["a"])
        moved = worker_of(gated.complete("x", headers={"x-session-id": "a"}))
        assert moved != homes["a"]
        gated.post("/admin/resume", engine=homes["a"])
        assert worker_of(gated.complete("x", headers={"x-session-id": "a"})) == moved


def test_engines_come_and_go() -> None:
    with fleet(workers=2) as served, Gated() as gated:
        assert gated.client.get("/health").status_code == 503
        refused = gated.complete("x", 503)
        assert refused.headers["retry-after"] == "1" and refused.json()["error"]["type"] == "ServiceUnavailableError"
        states = served.get("/admin/workers")

        def added(at: int, **more: object) -> dict[str, object]:
            stream = states[at]["streams"][0]
            told = {"url": states[at]["url"], "name": f"e{at}", "events": stream["endpoint"], **more}
            return dict(gated.post("/admin/engines", 201, **told, replay=stream["replay_endpoint"]).json())

        assert added(0)["state"] in ("starting", "ready")
        gated.ready(1, 1)
        assert "e0@0" in gated.complete(PROMPT).headers["x-kvyard-decision"]
        added(1, model="mock")
        gated.ready(2, 2)
        assert gated.post("/admin/engines", 409, url=states[0]["url"], name="e0").json()["error"]["code"] == 409
        assert "http://" in gated.post("/admin/engines", 400, url="nonsense").json()["error"]["message"]
        eventually(lambda: gated.post("/explain", body={"prompt": PROMPT}).json()["hit_blocks"] == 18)
        assert gated.post("/admin/drain", engine="e0").json()["draining"]
        for _ in range(3):
            assert "e1@0" in gated.complete(PROMPT).headers["x-kvyard-decision"]
        assert gated.post("/explain", body={"prompt": PROMPT}).json()["not_considered"] == {"e0": "it drains"}
        assert not gated.post("/admin/resume", engine="e0").json()["draining"]
        assert gated.post("/admin/remove", engine="e1").json()["name"] == "e1"
        assert "e0@0" in gated.complete([9] * 50).headers["x-kvyard-decision"]
        assert gated.post("/admin/remove", 404, engine="e1").json()["error"]["code"] == 404
        gated.post("/admin/remove", engine="e0")
        assert gated.engines() == {} and gated.client.get("/v1/models").json()["data"] == []
        assert not gated.gateway.index.models[("mock", "default")].indexer.sources
        # And in again, under its old name: nothing of what it had is remembered but what it says itself.
        added(0)
        gated.ready(1, 1)
        eventually(lambda: gated.post("/explain", body={"prompt": PROMPT}).json()["hit_blocks"] == 18)
        gated.idle()


def test_engines_behind_a_name() -> None:
    """Whatever localhost resolves to is an engine."""
    with fleet(workers=1) as served:
        (state,) = served.get("/admin/workers")
        stream = state["streams"][0]

        def port(address: str) -> int:
            return int(address.rpartition(":")[2])

        name = {
            "host": "localhost",
            "port": port(state["url"]),
            "events_port": port(stream["endpoint"]),
            "replay_port": port(stream["replay_endpoint"]),
        }
        with Gated(names=[name]) as gated:
            gated.ready(1)
            assert f"127.0.0.1:{name['port']}" in gated.engines()
            assert gated.complete("x").status_code == 200


def test_an_address_that_serves_another_model_later() -> None:
    """As when a pod's address is given to somebody else."""
    with fleet(served_model_name="old") as served, Gated(fleets=[served.url]) as gated:
        gated.ready(1, 1)
        assert gated.complete("x", model="old").status_code == 200
        worker = served.fleet.workers[0]
        served.inside(
            lambda: setattr(worker, "config", msgspec.structs.replace(worker.config, served_model_name="new"))
        )
        eventually(lambda: gated.engines()["worker0"]["pool"] == "new")
        gated.ready(1, 1)
        assert gated.complete("x", model="new").status_code == 200
        gated.complete("x", 404, model="old")
        gated.idle()


def test_comings_and_goings() -> None:
    with front(3, mock={"engine": PACE}, engine_requests=2, queue=20) as (gated, served):
        stop = threading.Event()
        answered: list[int] = []
        failed: list[object] = []

        def ask(seed: int) -> None:
            chance = random.Random(seed)
            with httpx.Client(base_url=gated.url, timeout=PATIENCE, trust_env=False) as patient:
                while not stop.is_set():
                    body = {"prompt": [chance.randrange(5)] * 64, "max_tokens": chance.randrange(1, 30)}
                    body |= {"ignore_eos": True, "stream": chance.random() < 0.7}
                    if chance.random() < 0.3:
                        hurry = chance.random() * 0.1
                        with suppress(httpx.TimeoutException):
                            httpx.post(f"{gated.url}/v1/completions", json=body, timeout=hurry, trust_env=False)
                        continue
                    try:
                        answered.append(patient.post("/v1/completions", json=body).status_code)
                    except httpx.HTTPError as error:
                        failed.append(error)

        def manage() -> None:
            config = msgspec.to_builtins(gated.gateway.members.engines["worker0"].config)
            while not stop.wait(0.1):
                gated.post("/admin/drain", engine="worker1")
                gated.post("/admin/remove", engine="worker0")
                stop.wait(0.05)
                gated.post("/admin/engines", 201, **config)
                gated.post("/admin/resume", engine="worker1")

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(12)]
        threads.append(threading.Thread(target=manage))
        for thread in threads:
            thread.start()
        counters = gated.gateway.traffic.counters
        eventually(lambda: len(answered) > 100 and counters.cancelled > 20, lambda: (answered, counters))
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        gated.ready(3, 3).idle()
        assert not failed and set(answered) == {200}
        ways = (counters.finished, counters.refused, counters.failed, counters.broken, counters.cancelled)
        assert counters.requests == sum(ways) and not counters.failed and not counters.broken
        eventually(lambda: gated.gateway.held.bytes == 0)
        # Whoever hung up has ended the engine's work too.
        eventually(lambda: all(one["running"] + one["waiting"] == 0 for one in served.get("/admin/workers")))


def test_a_model_that_is_gone_is_not_meant() -> None:
    """Without a name the only model that somebody serves is meant."""
    with ScriptedEngine(plain) as engine, gated(engine) as gate:
        gate.ready(1)
        gate.post("/admin/engines", 201, url="http://127.0.0.1:1", model="other")
        gate.complete("x", 400)
        gate.post("/admin/remove", engine="127.0.0.1:1")
        assert gate.complete("x").status_code == 200


def test_configuration_errors_are_reported_at_start(tmp_path: Path) -> None:
    """Pools are made when an engine first answers. That is too late to tell anybody."""
    with ScriptedEngine(plain) as engine:
        for settings, said in (
            ({"tokenizer": "/nowhere"}, "there is no tokenizer at"),
            ({"tokenizers": {"odd": "/nowhere"}}, "there is no tokenizer at"),
            ({"journal": str(tmp_path / "none" / "j")}, "can't write the journal"),
            ({"share": "nonsense"}, "no address"),
            ({"share": "redis://h:x"}, "write redis://HOST:PORT"),
            ({"names": [{"host": "a b", "port": 1}]}, "no name of a host"),
        ):
            with pytest.raises(KvyardError, match=said), gated(engine, **settings):
                pass


def test_an_engine_that_cannot_be_added_has_a_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once, and without a traceback."""
    (tmp_path / "j.2").write_text("in the way")
    other = b'{"data":[{"id":"other"}]}'
    with ScriptedEngine(plain) as one, ScriptedEngine(plain, models=other) as two:
        with gated(one, two, journal=str(tmp_path / "j")) as gate:
            eventually(lambda: gate.engines()["odd1"]["state"] == "down" or gate.engines()["odd0"]["state"] == "down")
            reasons = [one["reason"] for one in gate.engines().values() if one["state"] == "down"]
            assert len(reasons) == 1 and "it can't be applied" in reasons[0] and "exists" in reasons[0]
            gate.ready(1)
        assert "Traceback" not in caplog.text and caplog.text.count("it can't be applied") == 1


def test_a_model_that_was_given_wrong(caplog: pytest.LogCaptureFixture) -> None:
    """The engine says what is wrong. Waiting until nobody is busy, which nobody is, would help nobody."""
    with ScriptedEngine(plain) as engine, Gated(engines=[{"url": engine.url, "name": "e", "model": "typo"}]) as gate:
        gate.ready(1)
        for model in ("typo", "odd", None):
            assert gate.complete("x", model=model).status_code == 200
        assert len(engine.requests) == 3
        assert caplog.text.count("e serves odd, not typo as it was given") == 1


def test_an_engine_whose_events_cannot_be_followed_is_refused_where_its_model_is_known() -> None:
    """Who adds it can still be told."""
    events = ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]

    async def story() -> None:
        _, gateway = build(convert({"engines": [], "tokenizer": "bytes"}, "the test"))
        async with gateway:
            with pytest.raises(KvyardError, match="engine e has 1 ranks: list as many endpoints"):
                await gateway.members.add(GatewayEngine(url="http://127.0.0.1:1", name="e", model="odd", events=events))
            assert not gateway.members.engines

    asyncio.run(story())


def test_an_engine_that_is_removed_while_it_leaves_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its watch was about to stop listening when it was stopped itself; nobody must go on listening for ever."""

    async def story(url: str) -> None:
        _, gateway = build(convert({"engines": [], "tokenizer": "bytes"}, "the test"))
        async with gateway:
            await gateway.members.add(GatewayEngine(url=url, name="e", model="odd", events="tcp://127.0.0.1:1"))
            listeners = gateway.index.models["odd", "default"].listeners
            assert len(listeners) == 1
            with monkeypatch.context() as patched:

                async def interrupted(_: object) -> None:
                    raise asyncio.CancelledError

                patched.setattr(gateway.index, "unregister", interrupted)
                with pytest.raises(asyncio.CancelledError):
                    await gateway.members._leave(gateway.members.engines["e"])
            await gateway.members.remove("e")
            assert not listeners

    with ScriptedEngine(plain) as engine:
        asyncio.run(story(engine.url))


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_reports_its_event_endpoints(ranks: int) -> None:
    """Its URL is all that is given: endpoint, replay, topic and ranks come from /kv_event_sources."""
    with fleet(topic="kv@{worker}", dp_size=ranks) as served:
        told = served.get("/kv_event_sources")
        assert sorted(told) == [str(rank) for rank in range(ranks)]
        assert told["0"]["topic"] == "kv@worker0" and told["0"]["publisher"] == "zmq"
        with Gated(engines=[{"url": served.url, "name": "e"}]) as gated:
            gated.ready(1, ranks)
            (engine,) = gated.gateway.members.engines.values()
            assert engine.config.dp_size == ranks == len(engine.holders)
            assert gated.client.get("/health").json()["status"] == "ok"
            gated.complete(list(range(800)))
            explain = lambda: gated.post("/explain", body={"prompt": list(range(800))}).json()["hit_blocks"]  # noqa: E731
            eventually(lambda: explain() == 49)
        with Gated(engines=[{"url": served.url, "name": "e", "model": served.fleet.config.served_model_name}]) as gated:
            gated.ready(1, ranks)


def test_engines_without_kv_event_sources_are_asked_once() -> None:
    with fleet(events_endpoint=None, replay_endpoint=None) as served:
        assert served.get("/kv_event_sources") == {}
        with Gated(engines=[{"url": served.url, "name": "e"}]) as gated:
            gated.ready(1)
            assert [one["code"] for one in gated.client.get("/health").json()["reasons"]] == ["no-stream"]
            gated.complete("x")


def test_ports_without_a_host_are_on_the_engines_own() -> None:
    from kvyard.openai import EventSource
    from kvyard.server.gateway.config import GatewayEngine

    def found(url: str, *endpoints: tuple[str, str | None]) -> tuple[object, object]:
        sources = {at: EventSource(endpoint=one, replay_endpoint=two) for at, (one, two) in enumerate(endpoints)}
        config = GatewayEngine(url=url).with_events(sources)
        return config.events, config.replay

    assert found("http://10.0.0.1:8000", ("tcp://*:5557", "tcp://*:5558")) == (
        ["tcp://10.0.0.1:5557"],
        ["tcp://10.0.0.1:5558"],
    )
    assert found("http://[::1]:8000", ("tcp://0.0.0.0:1", None)) == (["tcp://[::1]:1"], None)
    assert found("http://h:8000", ("tcp://10.9.9.9:1", None), ("ipc:///x", "ipc:///y")) == (
        ["tcp://10.9.9.9:1", "ipc:///x"],
        None,
    )


def test_two_mocks_may_call_their_workers_the_same() -> None:
    with fleet(workers=1) as one, fleet(workers=1) as other:
        with Gated(fleets=[one.url, other.url]) as gated:
            assert {engine["url"] for engine in gated.engines().values()} == {*one.urls, *other.urls}


class RestartingEngine(ScriptedEngine):
    """Closes its connections, and serves another model from then on."""

    def __init__(self, model: str) -> None:
        super().__init__(self._answers)
        self._open: set[socket.socket] = set()
        self.hangs_up_on = 0
        """Requests."""
        self.become(model)

    def become(self, model: str) -> None:
        self.model = model
        self.models = json.dumps({"data": [{"id": model}]}).encode()

    def _answers(self, head: str, body: bytes) -> list[bytes]:
        if self.hangs_up_on:
            self.hangs_up_on -= 1
            return []
        asked = json.loads(body)["model"]
        return [answer("200 OK" if asked == self.model else "404 Not Found", b"{}")]

    def _serve(self, connection: socket.socket) -> None:
        self._open.add(connection)
        super()._serve(connection)
        self._open.discard(connection)

    def restart(self, model: str) -> None:
        self.become(model)
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def test_an_engine_that_comes_back_with_another_model_is_asked_before_it_gets_a_request_for_the_old_one() -> None:
    """It was away for so short a time that no look found it missing."""
    with RestartingEngine("old") as first, RestartingEngine("old") as second:
        with gated(first, second, health_seconds=60, router={"policy": "round-robin"}) as gate:
            gate.ready(2)
            for engine in (first, second):
                eventually(
                    lambda engine=engine: gate.post("/v1/completions", model="old", prompt="x") and engine.requests
                )
            first.restart("new")
            asked = len(first.requests)
            # The end of a connection takes a moment to get through; nothing else is waited for.
            eventually(lambda: gate.gateway.members.engines["odd0"].doubt or gate.engines()["odd0"]["pool"] == "new")
            for _ in range(4):
                gate.post("/v1/completions", model="old", prompt="x")
            assert len(first.requests) == asked
            eventually(lambda: gate.engines()["odd0"]["pool"] == "new")
            gate.post("/v1/completions", model="new", prompt="x")
            assert len(first.requests) == asked + 1


def test_a_suspect_is_asked_for_its_models_when_it_is_well_again() -> None:
    with RestartingEngine("old") as first, RestartingEngine("old") as second:
        with gated(first, second, health_seconds=60, router={"policy": "round-robin"}) as gate:
            gate.ready(2)
            first.become("new")
            first.hangs_up_on = 1
            eventually(lambda: gate.post("/v1/completions", model="old", prompt="x") and not first.hangs_up_on)
            eventually(lambda: gate.engines()["odd0"]["pool"] == "new")
