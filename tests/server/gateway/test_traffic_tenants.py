"""Tenants of one gateway: what a key's holder can learn of others, and change for them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.server.gateway.scripted_engine import ScriptedEngine, answer, gated
from tests.server.gateway.support import PATIENCE, Gated, cached, fleet, front

from kvyard.server.gateway.access import AccessKey
from kvyard.server.gateway.traffic import TenantSeries

MODELS = json.dumps(
    {"data": [{"id": "odd"}, {"id": "secret", "parent": "odd"}, {"id": "poet", "parent": "odd"}]}
).encode()
KEYS = """
[[keys]]
name = "plain"
key = "sk-plain"

[[keys]]
name = "curious"
key = "sk-curious"
explain = true
models = ["odd"]

[[keys]]
name = "some"
key = "sk-some"
models = ["odd", "poet"]

[[keys]]
name = "salted"
key = "sk-salted"
cache_salt = "0123456789abcdef"
"""


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def post(gate: Gated, path: str, headers: dict[str, str], **body: Any) -> HTTPResponse:
    """Send a path as it is: httpx would tidy it."""
    connection = HTTPConnection(gate.url.removeprefix("http://"), timeout=PATIENCE)
    with closing(connection):
        connection.request("POST", path, json.dumps(body), {**headers, "content-type": "application/json"})
        reply = connection.getresponse()
        reply.read()
        return reply


def tells_all(head: str, body: bytes) -> list[bytes]:
    """As another gateway behind this one would."""
    return [answer("200 OK", b'{"choices":[]}', more="x-kvyard-decision: worker=x\r\n")]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(KEYS)
    return str(path)


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(tells_all, MODELS) as engine:
        yield engine


@pytest.fixture(scope="module")
def gate(keys: str, engine: ScriptedEngine) -> Iterator[Gated]:
    settings: dict[str, Any] = {"pass_unknown": True, "admin_token": "sk-admin", "cors_origins": ["*"]}
    with gated(engine, keys_file=keys, **settings) as gate:
        yield gate.ready(1)


def test_decisions_are_shown_only_to_keys_with_explain(gate: Gated) -> None:
    for key, told in (("sk-plain", False), ("sk-salted", False), ("sk-curious", True)):
        reply = gate.complete("x" * 100, headers=bearer(key))
        assert ("x-kvyard-decision" in reply.headers) is told, key
        assert (
            gate.client.get("/version?model=odd", headers=bearer(key)).headers.get("x-kvyard-decision") is not None
        ) is told
    body = {"body": {"model": "odd", "prompt": "x"}}
    statuses = {
        key: gate.client.post("/explain", json=body, headers=bearer(key)).status_code
        for key in ("sk-plain", "sk-curious", "sk-admin", "sk-none")
    }
    assert statuses == {"sk-plain": 403, "sk-curious": 200, "sk-admin": 200, "sk-none": 401}
    others = {"body": {"model": "secret", "prompt": "x"}}
    assert gate.client.post("/explain", json=others, headers=bearer("sk-curious")).status_code == 404
    assert gate.client.post("/explain", json=others, headers=bearer("sk-admin")).status_code == 200


def test_without_keys_all_clients_are_one_tenant(engine: ScriptedEngine) -> None:
    with gated(engine, token="sk-all") as gate:
        gate.ready(1)
        assert "x-kvyard-decision" in gate.complete("x").headers


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/close_session"),
        *("/v1//load_lora_adapter", "//close_session", "/v1/./unload_lora_adapter", "/x/../close_session"),
        *("/v1/load%5Flora_adapter", "/load_lora_adapter", "/unload_lora_adapter", "/load_lora_adapter_from_tensors"),
        *("/v1/%2e/load_lora_adapter", "/a/..%2fclose_session"),
    ],
)
def test_what_all_clients_share_is_changed_by_operators_alone(gate: Gated, engine: ScriptedEngine, path: str) -> None:
    before = len(engine.requests)
    page = {"origin": "https://chat.example.org", "sec-fetch-site": "cross-site"}
    for headers in (bearer("sk-plain"), {**bearer("sk-plain"), **page}, {**bearer("sk-admin"), **page}):
        reply = post(gate, path, headers, lora_name="x", session_id="x")
        assert reply.status in (401, 403), (headers, reply.status)
        if "sk-admin" in headers["authorization"]:
            assert reply.getheader("access-control-allow-origin") is None or reply.status == 401
    assert len(engine.requests) == before


def test_pages_of_other_sites_are_no_operators_where_there_is_no_token(engine: ScriptedEngine) -> None:
    page = {"origin": "https://chat.example.org", "sec-fetch-site": "cross-site"}
    with gated(engine, cors_origins=["*"]) as gate:
        gate.ready(1)
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/close_session"):
            gate.post(path, 403, headers=page, lora_name="x", lora_path="x", session_id="x")
        gate.post("/close_session", headers={}, session_id="x")


def test_paths_that_are_known_go_no_other_way(gate: Gated, engine: ScriptedEngine) -> None:
    before = len(engine.requests)
    for path in ("/v1//chat/completions", "//v1/completions", "/v1/../v1/completions"):
        assert post(gate, path, bearer("sk-salted"), model="odd", prompt="x").status == 404
    gate.post("/generate", 403, headers=bearer("sk-salted"), text="x")
    assert len(engine.requests) == before


SECRET = json.dumps({"model": "secret"})
FORM = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nsecret\r\n--x--'


@pytest.mark.parametrize(
    ("body", "headers", "query"),
    [
        (SECRET.encode(), {}, ""),
        (SECRET.encode("utf-16"), {"content-type": "application/json; charset=utf-16"}, ""),
        (SECRET.encode("utf-16-le"), {}, ""),
        (SECRET.encode("utf-32"), {}, ""),
        (SECRET.encode("utf-8-sig"), {}, ""),
        (gzip.compress(SECRET.encode()), {"content-encoding": "gzip"}, ""),
        (b'{"model":"odd"}', {"content-encoding": "x"}, ""),
        (b'{"mod\\u0065l":"s\\u0065cret"}', {}, ""),
        (b'{"model":"odd","model":"secret"}', {}, ""),
        (b'{"model":["odd","secret"]}', {}, ""),
        (b'{"model":{"name":"secret"}}', {}, ""),
        (b'{"model":"odd","lora_path":"secret"}', {}, ""),
        (b'{"model":"odd","lora_path":["odd","secret"]}', {}, ""),
        (b'[{"model":"secret"}]', {}, ""),
        (FORM, {"content-type": "multipart/form-data; boundary=x"}, ""),
        (b"model=secret", {"content-type": "application/x-www-form-urlencoded"}, ""),
        (b"", {}, "?model=secret"),
        (b'{"model":"odd"}', {}, "?mod%65l=s%65cret"),
    ],
    ids=range(18),
)
def test_a_keys_models_hold_on_unknown_paths_however_they_are_named(
    gate: Gated, engine: ScriptedEngine, body: bytes, headers: dict[str, str], query: str
) -> None:
    before = len(engine.requests)
    reply = gate.client.post(f"/v1/audio{query}", content=body, headers={**bearer("sk-some"), **headers})
    assert reply.status_code in (404, 415), reply.text
    assert len(engine.requests) == before
    assert gate.client.post("/v1/audio", content=b'{"model":"poet"}', headers=bearer("sk-some")).status_code == 200
    assert (
        gate.client.post(f"/v1/audio{query}", content=body, headers={**bearer("sk-plain"), **headers}).status_code
        != 415
    )
    if body.startswith(b"{") and not headers:
        known = gate.client.post("/v1/completions", content=body, headers={**bearer("sk-some"), **headers})
        assert query or known.status_code in (400, 404, 415), known.text


@pytest.mark.zmq
def test_salts_keep_caches_apart_and_hits_within_a_tenant(tmp_path: Path) -> None:
    """A prompt that one tenant sent is cached for that tenant: others learn nothing of it by what is cached."""
    keys = tmp_path / "keys.toml"
    listed = "".join(f'[[keys]]\nname = "{one}"\nkey = "{one}"\n{salt}\n' for one, salt in (
        ("a", 'cache_salt = "salt-of-a"'), ("b", 'cache_salt = "salt-of-b"'), ("c", ""), ("d", "")
    ))  # fmt: skip
    keys.write_text(listed)
    prompt = "what nobody else knows " * 20
    for policy in ("least-time", "round-robin"):
        with (
            fleet(workers=1) as served,
            Gated(fleets=[served.url], keys_file=str(keys), router={"policy": policy}) as gate,
        ):
            gate.ready(1, 1)

            def hit(key: str, gate: Gated = gate, **more: Any) -> int:
                return cached(gate.complete(prompt, headers=bearer(key), **more))

            assert hit("a") == 0 and hit("a") > 0
            assert hit("b") == 0 and hit("c") == 0 and hit("d") > 0, "c and d share, by their own will"
            assert hit("a", cache_salt="mine") == 0 and hit("a", cache_salt="mine") > 0
            assert hit("b", cache_salt="mine") == 0
            assert hit("c", cache_salt="9:salt-of-a:mine") > 0, "who knows a salt is let in: it is a secret"
            chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 2}
            sent = [gate.client.post("/v1/chat/completions", json=chat, headers=bearer(key)) for key in ("a", "a", "b")]
            assert [cached(one) > 0 for one in sent] == [False, True, False]
            missing = [value for name, value in gate.metrics().items() if "missing_tokens_total" in name]
            assert not sum(missing), "what was promised was there"


def test_no_two_salts_make_one() -> None:
    pairs = [("a", "b:c"), ("a:b", "c"), ("3:a", "b"), ("a", ""), ("a", None), ("1:a:", ""), ("ab", "c"), ("a", "bc")]
    made = {AccessKey(name="x", key="x", cache_salt=salt).salted(given) for salt, given in pairs}
    assert len(made) == len(pairs) - 1, "an empty one is none"


def test_metrics_by_tenant() -> None:
    """Without keys a header names the tenant, and only so many have series of their own."""
    with front(1) as (served, _):
        for name in ("a", "a", "b"):
            served.complete("x" * 64, headers={"x-gateway-inference-fairness-id": name}, max_tokens=4)
        served.complete("x")
        served.idle()
        found = served.metrics()
        assert found['kvyard_gateway_tenant_requests_total{outcome="finished",tenant="a"}'] == 2
        assert found['kvyard_gateway_tenant_output_tokens_total{tenant="a"}'] == 8
        assert found['kvyard_gateway_tenant_cached_tokens_total{tenant="b"}'] > 0
        assert found['kvyard_gateway_tenant_engine_seconds_total{tenant="b"}'] > 0
        for at in range(TenantSeries.MOST + 5):
            served.complete("x", headers={"x-gateway-inference-fairness-id": f"t{at}"}, max_tokens=1)
        served.idle()
        names = [name for name in served.metrics() if name.startswith("kvyard_gateway_tenant_requests_total")]
        assert len(names) == TenantSeries.MOST + 1
        assert served.metrics()['kvyard_gateway_tenant_requests_total{outcome="finished",tenant="(others)"}'] == 7
