"""People who mean no good, or know no better: nobody else notices, and nothing is kept that they could make grow."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("starlette", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.server.gateway.odd import OddEngine, answer, chunked
from tests.server.gateway.support import PATIENCE, Gated, eventually, front, together

from kvyard.errors import KvyardError
from kvyard.server import heads
from kvyard.server.gateway.config import GatewayEngine, convert
from kvyard.server.gateway.headers import downstream, upstream
from kvyard.server.gateway.intake import LONG_SESSION
from kvyard.server.gateway.routes import build
from kvyard.server.http import Refusal

pytestmark = pytest.mark.zmq


def gated(*engines: OddEngine, **settings: Any) -> Gated:
    return Gated(engines=[{"url": engine.url, "name": f"odd{at}"} for at, engine in enumerate(engines)], **settings)


def plain(head: str, body: bytes) -> Sequence[bytes]:
    return [answer("200 OK", b"{}")]


def connect(gate: Gated) -> socket.socket:
    host, _, port = gate.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_a_name_that_somebody_guessed_is_not_given_again() -> None:
    """Names that are made here can be foretold: whoever takes the next one must not break another's request."""
    held = threading.Event()

    def script(head: str, body: bytes) -> Sequence[bytes]:
        if b"hold" in body:
            held.wait(PATIENCE)
        return plain(head, body)

    with OddEngine(script) as engine, gated(engine) as gate:
        gate.ready(1)
        gate.complete("x")
        made = engine.requests[-1][0].lower().partition("x-request-id: ")[2].partition("\r\n")[0]
        prefix, _, number = made.rpartition("-")
        guessed = f"{prefix}-{int(number) + 1}"
        thread = threading.Thread(target=lambda: gate.complete("hold", headers={"x-request-id": guessed}))
        thread.start()
        eventually(lambda: gate.gateway.traffic.counters.under_way == 1)
        try:
            assert gate.complete("y").status_code == 200
        finally:
            held.set()
            thread.join(PATIENCE)
        gate.idle()


def test_queries_go_along() -> None:
    with OddEngine(plain) as engine, gated(engine) as gate:
        gate.ready(1)
        gate.post("/v1/completions?api-version=2024%2F10&x=a+b", prompt="x")
        assert engine.requests[-1][0].startswith("POST /v1/completions?api-version=2024%2F10&x=a+b HTTP/1.1")
        gate.complete("x")
        assert engine.requests[-1][0].startswith("POST /v1/completions HTTP/1.1")
        with connect(gate) as connection:
            half = b"y" * (heads.HEADER_BYTES * 2 // 3)  # of an address and of headers together
            connection.sendall(b"GET /ping?%b HTTP/1.1\r\nhost: x\r\nx-long: %b\r\n\r\n" % (half, half))
            assert connection.recv(1000).startswith(b"HTTP/1.1 431")


def test_what_a_connection_names_stays_on_it() -> None:
    sent = [(b"connection", b"X-Hop"), (b"x-hop", b"1"), (b"x-other", b"2")]
    assert upstream(sent, "id", None, True) == [("x-request-id", "id"), ("x-other", "2")]
    # Not even by that can a client take away what we say ourselves.
    sent = [(b"connection", b"close, x-request-id, authorization"), (b"authorization", b"Bearer theirs")]
    assert upstream(sent, "id", "Bearer ours", True) == [("x-request-id", "id"), ("authorization", "Bearer ours")]
    said = [(b"Connection", b"x-private"), (b"X-Private", b"1"), (b"X-Public", b"2")]
    assert downstream(said, "d") == [(b"x-public", b"2"), (b"x-kvyard-decision", b"d")]


def test_names_and_urls_that_clients_would_see() -> None:
    with pytest.raises(KvyardError, match="printed in one line"):
        GatewayEngine(url="http://h:1", name="a\r\nset-cookie: b=c")
    with OddEngine(plain) as engine, gated(engine) as gate:
        said = gate.post("/admin/engines", 400, url="http://h:1", name="a\r\nx: y").json()
        assert "printed in one line" in said["error"]["message"]
        said = gate.post("/admin/engines", 400, url="http://user:secret@h:1").json()
        assert "has a password in it" in said["error"]["message"] and "secret" not in said["error"]["message"]


def test_pages_of_other_sites_change_nothing() -> None:
    """A browser sends a form to anybody, also to who listens on this machine only; it can't be read, but it was done."""
    with OddEngine(plain) as engine, gated(engine) as gate:
        gate.ready(1)
        body = json.dumps({"url": "http://thief:1"})
        for origin in ("https://elsewhere.example", "null"):
            reply = gate.client.post(
                "/admin/engines", content=body, headers={"origin": origin, "content-type": "text/plain"}
            )
            assert reply.status_code == 403 and list(gate.gateway.members.engines) == ["odd0"]
        reply = gate.client.post("/admin/drain", json={"engine": "odd0"}, headers={"origin": gate.url})
        assert reply.status_code == 200


def test_who_sends_no_head_and_who_sends_half_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "HEAD_SECONDS", 1.0)
    with OddEngine(plain) as engine, gated(engine) as gate:
        gate.ready(1)
        with connect(gate) as silent, connect(gate) as slow, connect(gate) as second:
            slow.sendall(b"GET /ping HTTP/1.1\r\nhost: x\r\nx-slow: ")
            second.sendall(b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n")
            assert second.recv(1000).startswith(b"HTTP/1.1 200")
            second.sendall(b"GET /ping HT")
            assert closed(silent) and closed(slow) and closed(second)
        assert gate.complete("x").status_code == 200


def test_who_reads_nothing_gives_the_engine_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "STUCK_SECONDS", 0.3)
    much = chunked(*[b"data: " + b"x" * 100_000 + b"\n\n"] * 400)
    with OddEngine(lambda head, body: much if b"much" in body else plain(head, body)) as engine, gated(engine) as gate:
        gate.ready(1)
        with connect(gate) as stuck:
            body = b'{"prompt": "much"}'
            stuck.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )
            eventually(lambda: gate.gateway.traffic.counters.cancelled == 1)
            gate.idle()
        monkeypatch.undo()
        with gate.stream("much") as reply:  # who reads gets all of it
            assert sum(map(len, reply.iter_raw())) > 40_000_000


def test_all_bodies_together_are_bounded() -> None:
    held = threading.Event()

    def script(head: str, body: bytes) -> Sequence[bytes]:
        held.wait(PATIENCE)
        return plain(head, body)

    long = "x" * 400_000
    with OddEngine(script) as engine, gated(engine, held_bytes=1 << 20, tokenizer="bytes") as gate:
        gate.ready(1)
        threads = [threading.Thread(target=gate.complete, args=(long,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        eventually(lambda: gate.gateway.traffic.counters.under_way == 2)
        reply = gate.complete(long, 429)
        assert reply.headers["retry-after"] and "bytes already" in reply.json()["error"]["message"]
        held.set()
        for thread in threads:
            thread.join(PATIENCE)
        gate.idle()
        assert gate.gateway.traffic.held == 0
        assert gate.complete(long).status_code == 200
        assert gate.metrics()['kvyard_gateway_requests_total{model="",outcome="refused"}'] == 1


def test_many_texts_are_not_many_questions() -> None:
    """The engine is asked for the tokens of one of them, however many there are."""

    def script(head: str, body: bytes) -> Sequence[bytes]:
        return [answer("200 OK", json.dumps({"tokens": list(range(40))}).encode() if "/tokenize" in head else b"{}")]

    with OddEngine(script) as engine, gated(engine, tokenizer="engine") as gate:
        gate.ready(1)
        gate.complete(["x" * 80] * 500)
        asked = [head for head, _ in engine.requests if "/tokenize" in head]
        assert len(asked) == 1
        assert gate.metrics()['kvyard_gateway_prompt_tokens_total{model="odd"}'] == 500 * 40


def test_odd_prompts_are_the_engines_to_judge() -> None:
    with OddEngine(plain) as engine, gated(engine) as gate:
        gate.ready(1)
        for prompt in (
            [1, "a"],
            [[1], ["a"]],
            [[1], 2],
            ["a", [1]],
            [],
            [[]],
            [-1, 1 << 70],
            {"a": 1},
            [True],
            ["", "x"],
        ):
            assert gate.complete(prompt, n=10**9).status_code == 200
        assert len(engine.requests) == 10
        gate.idle()


def test_sessions_without_end_are_kept_short() -> None:
    with front(1, router={"policy": "affinity"}) as (gate, _):
        long = "s" * 50_000
        gate.complete("x", headers={"x-session-id": long})
        gate.complete("x", headers={"x-session-id": "short"})
        bound = gate.gateway.members.pools["mock"].router.policy._bound  # type: ignore[attr-defined]
        assert len(bound) == 2 and "short" in bound and max(map(len, bound)) < LONG_SESSION
        assert "why=session" in gate.complete("x", headers={"x-session-id": long}).headers["x-kvyard-decision"]


def test_a_model_that_is_gone_is_not_meant() -> None:
    """Without a name the only model that somebody serves is meant."""
    with OddEngine(plain) as engine, gated(engine) as gate:
        gate.ready(1)
        gate.post("/admin/engines", 201, url="http://127.0.0.1:1", model="other")
        gate.complete("x", 400)
        gate.post("/admin/remove", engine="127.0.0.1:1")
        assert gate.complete("x").status_code == 200


def test_what_cannot_be_made_later_is_said_at_once(tmp_path: Path) -> None:
    """Pools are made when an engine first answers. That is too late to tell anybody."""
    with OddEngine(plain) as engine:
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


def test_an_engine_that_cannot_be_taken_in_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once, and without a traceback."""
    (tmp_path / "j.2").write_text("in the way")
    other = b'{"data":[{"id":"other"}]}'
    with OddEngine(plain) as one, OddEngine(plain, models=other) as two:
        with gated(one, two, journal=str(tmp_path / "j")) as gate:
            eventually(lambda: gate.engines()["odd1"]["state"] == "down" or gate.engines()["odd0"]["state"] == "down")
            reasons = [one["reason"] for one in gate.engines().values() if one["state"] == "down"]
            assert len(reasons) == 1 and "it can't be taken in" in reasons[0] and "exists" in reasons[0]
            gate.ready(1)
        assert "Traceback" not in caplog.text and caplog.text.count("it can't be taken in") == 1


def test_an_index_that_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Its answer is JSON of the right shape without a result in it."""
    with OddEngine(lambda head, body: [answer("200 OK", b'{"block_size": 16, "results": []}')]) as index:
        with OddEngine(plain) as engine, gated(engine, index_url=index.url) as gate:
            gate.ready(1)
            assert gate.complete("x" * 40).status_code == 200
            remote = gate.gateway.members.pools["odd"].remote
            assert remote is not None and remote.failures == 1 and "without a result" in remote.error
            gate.complete("x" * 40)
        assert caplog.text.count("so load decides: it answered without a result") == 1


def test_a_page_of_refusals_has_no_names_of_its_own() -> None:
    with OddEngine(plain) as engine, gated(engine) as gate:
        gate.ready(1)
        replies = together([lambda at=at: gate.complete("x", 404, model=f"invented-{at}") for at in range(5)])
        assert all(isinstance(one, httpx.Response) for one in replies)
        assert "invented" not in gate.client.get("/metrics").text
        with pytest.raises(Refusal):
            gate.gateway.members.engine("invented")


@pytest.mark.parametrize("apart", [False, True])
def test_who_asks_for_another_protocol_keeps_his_body(apart: bool) -> None:
    """As Java's own client does, with its first request on every connection."""
    with OddEngine(plain) as engine, gated(engine) as gate, connect(gate) as connection:
        gate.ready(1)
        body = b'{"prompt": "\\r\\nconnection: upgrade"}'
        head = (
            b"POST /v1/completions HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\ncontent-length: %d\r\nhost: x\r\n"
            b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c\r\n\r\n" % len(body)
        )
        for piece in (head, body) if apart else (head + body,):
            connection.sendall(piece)
            gate.client.get("/ping")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        sent, got = engine.requests[-1]
        assert got == body and "upgrade" not in sent.lower() and "http2" not in sent.lower()


def test_as_many_files_as_there_may_be() -> None:
    program = (
        "import resource as r; from kvyard.server.running import allow_files; hard = r.getrlimit(r.RLIMIT_NOFILE)[1];"
        "r.setrlimit(r.RLIMIT_NOFILE, (64, hard)); allow_files(); print(r.getrlimit(r.RLIMIT_NOFILE)[0] > 64)"
    )
    pytest.importorskip("resource", reason="there are no such limits here")
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "True"


def test_a_model_that_was_given_wrong(caplog: pytest.LogCaptureFixture) -> None:
    """The engine says what is wrong. Waiting until nobody is busy, which nobody is, would help nobody."""
    with OddEngine(plain) as engine, Gated(engines=[{"url": engine.url, "name": "e", "model": "typo"}]) as gate:
        gate.ready(1)
        for model in ("typo", "odd", None):
            assert gate.complete("x", model=model).status_code == 200
        assert len(engine.requests) == 3
        assert caplog.text.count("e serves odd, not typo as it was given") == 1


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

    with OddEngine(plain) as engine:
        asyncio.run(story(engine.url))
