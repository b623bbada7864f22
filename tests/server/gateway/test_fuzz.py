"""Anything may be sent, to every route: it is answered with less than 500, as described, and nothing hangs."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.server.gateway.support import Gated, front
from tests.server.threaded import check_description

from kvyard.engine.timing import FixedTiming
from kvyard.server.gateway.adapters import LOAD, UNLOAD
from kvyard.server.gateway.routes import PASSED

pytestmark = pytest.mark.zmq

QUICKLY = {"engine": {"timing": FixedTiming(prefill_ms=0.02, decode_ms=0.01)}}
ADMIN = ["/admin/engines", "/admin/remove", "/admin/drain", "/admin/resume", "/admin/expectation", LOAD, UNLOAD]
PATHS = [*PASSED, "/close_session", "/explain", *ADMIN]
WORDS = [
    "model",
    "prompt",
    "messages",
    "stream",
    "body",
    "engine",
    "url",
    "tools",
    "cache_salt",
    "max_tokens",
    "n",
    "path",
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=10)
    | st.sampled_from(["mock"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def gated() -> Iterator[Gated]:
    with front(2, mock=QUICKLY) as (gated, _):
        yield gated
        for name in gated.engines():
            gated.client.post("/admin/remove", json={"engine": name})
        gated.idle()


def answered(gated: Gated, path: str, content: bytes) -> None:
    reply = gated.client.post(path, content=content)
    assert reply.status_code < 500, (path, content, reply.status_code, reply.text)
    if reply.status_code == 404 and path in PASSED and "detail" in reply.json():
        return  # the engine has no such route, and says so as vLLM does
    if reply.status_code >= 400:
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(PATHS), body=st.dictionaries(st.sampled_from(WORDS), VALUES, max_size=6) | VALUES)
def test_any_json(gated: Gated, path: str, body: object) -> None:
    answered(gated, path, json.dumps(body).encode())


@settings(max_examples=40, deadline=None)
@given(path=st.sampled_from(PATHS), content=st.binary(max_size=100))
def test_any_bytes(gated: Gated, path: str, content: bytes) -> None:
    answered(gated, path, content)


@settings(max_examples=40, deadline=None)
@given(
    headers=st.dictionaries(
        st.sampled_from(
            [
                "x-request-id",
                "x-session-id",
                "x-data-parallel-rank",
                "accept",
                "te",
                "connection",
                "x-a",
            ]
        ),
        st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20),
        max_size=4,
    )
)
def test_any_headers(gated: Gated, headers: dict[str, str]) -> None:
    headers.pop("connection", None)
    reply = gated.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers)
    assert reply.status_code == 200, (headers, reply.text)


def test_every_route_is_described(gated: Gated) -> None:
    described = gated.client.get("/openapi.json").json()
    taking = {path for path, methods in described["paths"].items() if "requestBody" in methods.get("post", {})}
    assert taking == {*PATHS, "/v1/responses/{response_id}/cancel"}
    for path, methods in described["paths"].items():
        if "get" in methods and "{" not in path:
            assert gated.client.get(path).status_code == 200, path


def description_is_true(examples: int) -> None:
    with front(2, mock=QUICKLY) as (gated, _):
        check_description(gated.url, examples)
        for name in set(gated.engines()) - {"worker0", "worker1"}:
            gated.post("/admin/remove", engine=name)
        gated.idle()


def test_the_description_is_true() -> None:
    description_is_true(4)


@pytest.mark.slow
def test_the_description_is_true_in_many_cases() -> None:
    description_is_true(60)
