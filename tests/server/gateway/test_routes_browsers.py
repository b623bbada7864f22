"""Pages of other sites, and paths that only engines know."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.server.gateway.scripted_engine import ScriptedEngine, answer, chunked, gated

pytestmark = pytest.mark.zmq

PAGE = {"origin": "https://chat.example.org", "sec-fetch-site": "cross-site"}
OTHER = {"origin": "https://evil.example.org", "sec-fetch-site": "cross-site"}


def script(head: str, body: bytes) -> Any:
    return chunked(b"data: a\n\n", b"data: [DONE]\n\n") if b"stream" in body else [answer("200 OK", b'{"choices":[]}')]


@pytest.mark.parametrize("listed", ["https://chat.example.org/", "*"])
def test_pages_that_are_listed_may_ask(listed: str) -> None:
    with ScriptedEngine(script) as engine, gated(engine, cors_origins=[listed]) as gate:
        gate.ready(1)
        asked = {**PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        first = gate.client.options("/v1/chat/completions", headers=asked)
        assert first.status_code == 204 and first.headers["access-control-allow-headers"] == "authorization"
        for stream in ({}, {"stream": True}):
            reply = gate.complete("x", headers=PAGE, **stream)
            assert reply.headers["access-control-allow-origin"] == PAGE["origin"] and reply.headers["vary"] == "origin"
            assert "x-kvyard-decision" in reply.headers["access-control-expose-headers"]
        assert "origin" not in engine.requests[-1][0].lower().split()
        # A page is no operator, and one that isn't listed is let in nowhere.
        for headers, path in ((PAGE, "/admin/drain"), (OTHER, "/admin/drain"), (PAGE, "/explain")):
            refused = gate.client.post(path, json={"engine": "x"}, headers=headers)
            assert refused.status_code == 403 and "access-control-allow-origin" not in refused.headers
        if listed != "*":
            gate.complete("x", 403, headers=OTHER)
            assert gate.client.options("/v1/completions", headers={**asked, **OTHER}).status_code == 405
        assert gate.complete("x").status_code == 200


def test_without_the_option_no_page_of_another_site_may() -> None:
    with ScriptedEngine(script) as engine, gated(engine) as gate:
        gate.ready(1)
        gate.complete("x", 403, headers=PAGE)


def test_unknown_paths_go_to_an_engine_where_that_is_wanted() -> None:
    with ScriptedEngine(script) as engine, gated(engine, pass_unknown=True) as gate:
        gate.ready(1)
        reply = gate.client.post("/v1/odd%20path?a=b%20c", json={"model": "odd", "x": 1})
        assert reply.status_code == 200 and "x-kvyard-decision" in reply.headers
        head, body = engine.requests[-1]
        assert head.startswith("POST /v1/odd%20path?a=b%20c HTTP/1.1") and body == b'{"model":"odd","x":1}'
        assert gate.client.get("/version").status_code == 200
        head, body = engine.requests[-1]
        assert head.startswith("GET /version HTTP") and "content-length" not in head.lower() and not body
        assert gate.client.put("/v1/files", content=b"\x00\xff").status_code == 200
        assert engine.requests[-1][1] == b"\x00\xff"
        # A line end in a path is no end of a line.
        assert gate.client.get("/a%0d%0aX-Bad:%201%0d%0a%0d%0aGET%20/b").status_code == 200
        assert engine.requests[-1][0].startswith("GET /a%0D%0AX-Bad%3A%201%0D%0A%0D%0AGET%20/b HTTP")
        assert gate.client.request("PROPFIND", "/x").status_code == 405
        assert gate.client.post("/x", json={"model": "none"}).status_code == 404
        assert gate.client.put("/v1/completions", json={}).status_code == 405, "known, but not so"
        gate.idle()
    with ScriptedEngine(script) as engine, gated(engine) as gate:
        gate.ready(1)
        assert gate.client.get("/version").status_code == 404
