"""Keys, rates, and the access log."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import eventually

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.server.gateway.scripted_engine import ScriptedEngine, answer, chunked
from tests.server.gateway.support import Gated

from kvyard.clock import SECOND, VirtualClock
from kvyard.errors import KvyardError
from kvyard.server.gateway.access import AccessKey, KeyRing, RateTicket, read_keys
from kvyard.server.gateway.access.keys import KeyFile
from kvyard.server.gateway.access.rates import Allowance, Rate, TokenBucket
from kvyard.server.gateway.access_log import AccessLine, AccessLog
from kvyard.server.http import Refusal

SAID = (
    b'{"choices":[],"usage":{"prompt_tokens":30,"completion_tokens":10,"prompt_tokens_details":{"cached_tokens":16}}}'
)
SHA = hashlib.sha256(b"sk-b").hexdigest()
FILE = f"""
[[keys]]
name = "a"
key = "sk-a"
requests_per_minute = 3

[[keys]]
name = "b"
sha256 = "{SHA}"
models = ["od*"]
tokens_per_minute = 60

[[keys]]
name = "c"
key = "sk-c"
models = ["other"]

[models.odd]
requests_per_minute = 1000
"""


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_bucket_fills_evenly() -> None:
    clock = VirtualClock()
    bucket = TokenBucket(60, clock.now)
    bucket.take(60)
    assert bucket.level == 0 and bucket.wait(3) == pytest.approx(3)
    clock.advance(2 * SECOND)
    assert bucket.level == pytest.approx(2) and bucket.wait(2) == 0
    bucket.take(12)
    assert bucket.level == pytest.approx(-10) and bucket.wait(1) == pytest.approx(11)
    clock.advance(1000 * SECOND)
    assert bucket.level == 60, "no more than a minute's worth"
    assert bucket.wait(500) == 0, "what is larger than a minute's worth goes when the bucket is full"
    bucket.take(-5)
    assert bucket.level == 60


def test_a_ticket_takes_all_or_nothing() -> None:
    clock = VirtualClock()
    wide = Allowance("model m", Rate(requests_per_minute=100, tokens_per_minute=1000), clock.now)
    tight = Allowance("key k", Rate(requests_per_minute=2), clock.now)
    tickets = [RateTicket([wide, tight], 100) for _ in range(2)]
    with pytest.raises(Refusal) as refused:
        RateTicket([wide, tight], 100)
    assert refused.value.status == 429 and "key k may have 2 requests" in str(refused.value)
    assert refused.value.headers["Retry-After"] == "30" or refused.value.headers["Retry-After"] == "31"
    assert refused.value.headers["x-ratelimit-remaining-requests"] == "0"
    assert wide.requests is not None and wide.requests.level == 98
    assert wide.tokens is not None and wide.tokens.level == 800
    tickets[0].settle(150)
    assert wide.tokens.level == 750
    found = dict(tickets[1].headers())
    assert found[b"x-ratelimit-limit-requests"] == b"2" and found[b"x-ratelimit-remaining-tokens"] == b"750"
    assert found[b"x-ratelimit-reset-tokens"] == b"15.000s"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("keys = []", "keys"),
        ('[[keys]]\nname = "a"', "either key or sha256"),
        ('[[keys]]\nname = "a"\nkey = "x"\nsha256 = "y"', "either key or sha256"),
        ('[[keys]]\nname = "a"\nsha256 = "y"', "64 hexadecimal digits"),
        ('[[keys]]\nname = "a"\nkey = "x y"', "one word"),
        ('[[keys]]\nname = "a"\nkey = "x"\nrequests_per_minute = 0', "requests_per_minute"),
        ('[[keys]]\nname = "a"\nkey = "x"\nmodel = "x"', "did you mean"),
        ('[[keys]]\nname = "a"\nkey = "x"\n[[keys]]\nname = "a"\nkey = "y"', "two keys are called a"),
        ('[[keys]]\nname = "a"\nkey = "x"\n[[keys]]\nname = "b"\nkey = "x"', "used by two clients"),
        ("keys", "is not TOML"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(KvyardError) as error:
        read_keys(str(path))
    assert str(path) in str(error.value) and (said in str(error.value) or said == "did you mean"), error.value
    with pytest.raises(KvyardError, match="can't read"):
        read_keys(str(tmp_path / "none.toml"))


def test_a_new_file_keeps_what_was_used() -> None:
    clock = VirtualClock()
    a, b = AccessKey(name="a", key="x", requests_per_minute=2), AccessKey(name="b", key="y", requests_per_minute=2)
    ring = KeyRing(KeyFile(keys=[a, b]), clock.now)
    for key in (a, b):
        ring.admit(ring.find(f"Bearer {key.key}"), "m", 0)
    ring.replace(KeyFile(keys=[a, AccessKey(name="b", key="z", requests_per_minute=5)]))
    left = dict(ring.admit(a, "m", 0).headers())
    assert left[b"x-ratelimit-remaining-requests"] == b"0"
    left = dict(ring.admit(ring.find("bearer z"), "m", 0).headers())
    assert left[b"x-ratelimit-remaining-requests"] == b"4"
    for wrong in ("Bearer y", "Basic x", "", "Bearer "):
        with pytest.raises(Refusal):
            ring.check(wrong)


@pytest.mark.zmq
def test_keys_models_rates_and_the_log(tmp_path: Path) -> None:
    keys, log = tmp_path / "keys.toml", tmp_path / "access.log"
    keys.write_text(FILE)

    def script(head: str, body: bytes) -> Any:
        return chunked(b"data: a\n\n", b"data: [DONE]\n\n") if b"stream" in body else [answer("200 OK", SAID)]

    with (
        ScriptedEngine(script) as engine,
        Gated(engines=[{"url": engine.url}], keys_file=str(keys), access_log=str(log)) as gate,
    ):
        eventually(lambda: gate.client.get("/health").json()["ready"])
        assert gate.complete("x", 401).json()["error"]["type"] == "AuthenticationError"
        assert gate.complete("x", 401, headers=bearer("sk-x")).headers["www-authenticate"] == "Bearer"
        assert gate.client.get("/v1/models").status_code == 401
        for key, models in (("sk-a", ["odd"]), ("sk-c", [])):
            listed = gate.client.get("/v1/models", headers=bearer(key)).json()["data"]
            assert [one["id"] for one in listed] == models
        assert gate.client.get("/admin/engines", headers=bearer("sk-a")).status_code == 403
        gate.complete("x", 404, headers=bearer("sk-c"))
        # By key: three requests a minute.
        replies = [gate.complete("secret words", headers=bearer("sk-a")) for _ in range(3)]
        assert [one.headers["x-ratelimit-remaining-requests"] for one in replies] == ["2", "1", "0"]
        assert "authorization" not in engine.requests[-1][0].lower(), "it was meant for us"
        refused = gate.complete("x", 429, headers=bearer("sk-a"))
        assert refused.json()["error"]["type"] == "RateLimitError" and int(refused.headers["retry-after"]) >= 1
        assert refused.headers["x-ratelimit-limit-requests"] == "3"
        # By tokens: the engine says 40, of which 8 were taken at the start.
        first = gate.complete("12345678", headers=bearer("sk-b"))
        assert first.headers["x-ratelimit-remaining-tokens"] == "52"
        gate.idle()
        with gate.stream("1234", headers=bearer("sk-b")) as reply:
            reply.read()
            assert 16 <= int(reply.headers["x-ratelimit-remaining-tokens"]) < 40
        gate.complete("x" * 59, 429, headers=bearer("sk-b"))
        gate.idle()
        assert gate.metrics()['kvyard_gateway_key_refused_total{key="a"}'] == 1
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert "secret" not in log.read_text() and "sk-" not in log.read_text()
    assert [line["status"] for line in lines] == [404, 200, 200, 200, 429, 200, 200, 429]
    done = lines[1]
    assert done["key"] == "a" and done["model"] == "odd" and done["path"] == "/v1/completions"
    assert (done["prompt_tokens"], done["cached_tokens"], done["output_tokens"]) == (30, 16, 10)
    assert done["outcome"] == "finished" and done["engine"] and done["tries"] == 1
    assert 0 <= done["placed_ms"] <= done["first_byte_ms"] <= done["total_ms"]
    assert log.stat().st_mode & 0o077 == 0


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(KvyardError, match="access log"):
        AccessLog(str(tmp_path / "no" / "such"))
    path = tmp_path / "log"
    log = AccessLog(str(path))
    log.add(AccessLine(time=1.0, path="/p", status=200, outcome="finished"))
    path.rename(tmp_path / "old")
    log.reopen()
    log.add(AccessLine(time=2.0, path="/p", status=200, outcome="finished"))
    log.close()
    assert len((tmp_path / "old").read_text().splitlines()) == len(path.read_text().splitlines()) == 1
    full = AccessLog("/dev/full")
    full.add(AccessLine(time=1.0, path="/p", status=200, outcome="finished"))
    full.flush()
    assert full.lost == 1 and full.error


@pytest.mark.parametrize("user", ["me", "usage", "u" * 5000])
def test_repeated_usage_of_a_response_is_not_charged(tmp_path: Path, user: str) -> None:
    def said(head: str, body: bytes) -> list[bytes]:
        usage = {"input_tokens": 2, "output_tokens": 900}
        return [answer("200 OK", json.dumps({"id": "resp_1", "usage": usage, "user": user}).encode())]

    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkey = "sk-a"\ntokens_per_minute = 400\n')
    with ScriptedEngine(said) as engine, Gated(engines=[{"url": engine.url}], keys_file=str(keys)) as gated:
        gated.ready(1)
        asked = {"model": "odd", "input": "x", "user": user}
        replies = [gated.client.post("/v1/responses", json=asked, headers=bearer("sk-a")) for _ in range(2)]
        assert [one.status_code for one in replies] == [200, 429]


def test_unserved_requests_are_refunded(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkey = "sk-a"\nrequests_per_minute = 3\ntokens_per_minute = 50\n')
    engines = [{"url": "http://127.0.0.1:9", "model": "odd"}]
    with Gated(engines=engines, keys_file=str(keys), tokenizer="bytes", queue=0) as gated:
        asked = {"model": "odd", "prompt": "x" * 40}
        replies = [gated.client.post("/v1/completions", json=asked, headers=bearer("sk-a")) for _ in range(4)]
        assert [one.status_code for one in replies] == [503, 503, 503, 429]
        assert "3 requests" in replies[-1].text, "each is a request all the same"


def test_a_prompt_that_nobody_counts_is_paid_by_its_length(tmp_path: Path) -> None:
    def said(head: str, body: bytes) -> list[bytes]:
        first, *rest = chunked(b'data: {"choices":[{"text":"a"}]}\n\n', b"data: [DONE]\n\n")
        return [first.replace(b"application/json", b"text/event-stream"), *rest]

    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkey = "sk-a"\ntokens_per_minute = 1000\n')
    settings: dict[str, Any] = {"router": {"policy": "round-robin"}, "keys_file": str(keys)}
    with ScriptedEngine(said) as engine, Gated(engines=[{"url": engine.url}], **settings) as gated:
        gated.ready(1)
        asked = {"model": "odd", "prompt": "word " * 700, "stream": True}
        replies = [gated.client.post("/v1/completions", json=asked, headers=bearer("sk-a")) for _ in range(2)]
        assert [one.status_code for one in replies] == [200, 429]


def test_keys_hold_for_stored_responses(tmp_path: Path) -> None:
    def said(head: str, body: bytes) -> list[bytes]:
        return [answer("200 OK", b'{"id":"resp_1"}')]

    keys = tmp_path / "keys.toml"
    keys.write_text(FILE)
    with ScriptedEngine(said) as engine, Gated(engines=[{"url": engine.url}], keys_file=str(keys)) as gated:
        gated.ready(1)
        asked = {"model": "odd", "input": "x"}
        assert gated.client.post("/v1/responses", json=asked, headers=bearer("sk-a")).status_code == 200
        read = "/v1/responses/resp_1"
        assert gated.client.get(read, headers=bearer("sk-c")).status_code == 404
        assert gated.client.post(f"{read}/cancel", json={}, headers=bearer("sk-c")).status_code == 404
        assert [gated.client.get(read, headers=bearer("sk-a")).status_code for _ in range(3)] == [200, 200, 429]
