"""Who may use which route."""

from __future__ import annotations

import json

import pytest
from tests.waiting import eventually

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.server.gateway.scripted_engine import ScriptedEngine, answer, gated, plain

ODD = [b": hello\r\n\r\n", b"data:  {'not': json}\n", b"\n", b"id: 7\xc3\x28\ndata: x\n\n" * 3, b"data: [DONE]\r\n\r\n"]
SERVER_ERROR = answer("500 Internal Server Error", b'{"error":{"message":"no","type":"x","param":null,"code":500}}')
pytestmark = pytest.mark.zmq


def test_admin_has_a_token_of_its_own() -> None:
    with (
        ScriptedEngine(lambda head, body: [answer("200 OK", b"{}")]) as engine,
        gated(engine, token="a", admin_token="b") as gate,
    ):
        eventually(lambda: gate.client.get("/health").status_code == 200)
        admin = {"authorization": "Bearer b"}
        assert gate.client.get("/admin/engines").status_code == 401
        assert gate.client.get("/admin/engines", headers=admin).status_code == 200
        assert gate.client.post("/explain", json={"body": {}}).status_code == 401
        assert gate.client.post("/admin/drain", json={"engine": "odd0"}).status_code == 401
        assert gate.client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
        assert gate.client.post("/v1/completions", json={"prompt": "x"}, headers=admin).status_code == 401
        assert gate.client.get("/dashboard/view").status_code == 401
        assert gate.client.get("/dashboard/view", headers=admin).status_code == 200
        for path in ("/health", "/ping", "/metrics"):
            assert gate.client.get(path, headers={"authorization": ""}).status_code == 200


def test_pages_of_other_sites_change_nothing() -> None:
    """A browser sends a form to anybody, also to who listens on this machine only; it can't be read, but it was done."""
    with ScriptedEngine(plain) as engine, gated(engine) as gate:
        gate.ready(1)
        body = json.dumps({"url": "http://thief:1"})
        for origin in ("https://elsewhere.example", "null"):
            reply = gate.client.post(
                "/admin/engines", content=body, headers={"origin": origin, "content-type": "text/plain"}
            )
            assert reply.status_code == 403 and list(gate.gateway.members.engines) == ["odd0"]
        reply = gate.client.post("/admin/drain", json={"engine": "odd0"}, headers={"origin": gate.url})
        assert reply.status_code == 200
