"""Whatever is sent, something sensible is answered: never a 500, never silence, and never what the description doesn't say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")

from tests.server.support import Served
from tests.server.threaded import check_description
from tests.server.wire import Wire

pytestmark = pytest.mark.zmq

MANY = max(40, settings.default.max_examples // 2)
PATHS = ("/register", "/unregister", "/query", "/query_by_hash", "/score", "/explain")
WORDS = [
    "model_name", "tenant_id", "routing_group", "endpoint", "instance_id", "pool", "members", "block_size", "dp_rank",
    "dp_size", "rank_from_events", "replay_endpoint", "stream", "topic", "dialect", "clear_scope", "tier", "groups",
    "alignment", "token_ids", "block_hashes", "text", "media", "batch", "workers", "lora_name", "cache_salt", "hash",
    "offset", "length", "kind", "window", "chunk", "mode", "eagle", "additional_salt",
]  # fmt: skip
ATOMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(0, 40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(
        [
            "m",
            "default",
            "1",
            "tcp://127.0.0.1:9",
            "tcp://*:0",
            "ipc:///nowhere/x",
            "vllm",
            "auto",
            "all",
            "gpu",
            "full",
        ]
    )
)
VALUES = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=5), inner, max_size=6)
    ),
    max_leaves=20,
)
BODIES = st.dictionaries(st.sampled_from(WORDS), VALUES, max_size=8)
CLOSE = st.fixed_dictionaries(
    {"model_name": st.sampled_from(["m", "x"])},
    optional={
        "instance_id": st.integers(0, 1 << 65) | st.sampled_from(["1", "a"]),
        "pool": st.text(max_size=3),
        "endpoint": st.sampled_from(
            ["tcp://127.0.0.1:9", "tcp://127.0.0.1:65535", "ipc:///nowhere/x", "tcp://[::1]:9", "x"]
        ),
        "token_ids": st.lists(st.integers(-1, 1 << 33), max_size=40),
        "block_hashes": st.lists(st.integers(), max_size=10),
        "text": st.text(max_size=5),
        "dp_rank": st.integers(-1, 5),
        "dp_size": st.integers(0, 4),
        "block_size": st.integers(0, 70),
        "alignment": st.integers(0, 70),
        "media": st.lists(
            st.fixed_dictionaries(
                {"hash": st.text(max_size=3), "offset": st.integers(-1, 1 << 70), "length": st.integers(0, 1 << 70)}
            ),
            max_size=3,
        ),
        "groups": st.lists(
            st.fixed_dictionaries(
                {},
                optional={
                    "kind": st.sampled_from(["full", "mamba", "sliding_window", "chunked_local", "mla", "x"]),
                    "window": st.none() | st.integers(0, 50),
                    "chunk": st.none() | st.integers(0, 50),
                    "block_size": st.integers(0, 50),
                    "mode": st.sampled_from(["all", "none", "align"]),
                    "eagle": st.booleans(),
                },
            ),
            max_size=3,
        ),
        "workers": st.none() | st.lists(st.integers(0, 1 << 70) | st.text(max_size=3), max_size=3),
        "lora_name": st.none() | st.text(max_size=5),
        "cache_salt": st.none() | st.text(max_size=5),
    },
)


@pytest.fixture(scope="module")
def served():
    with Wire() as wire, Served(block_size=4) as service:
        service.register(instance_id=1, endpoint=wire.endpoint)
        eventually(lambda: service.get("/workers")[0]["status"] == "active")
        wire.stored([1, 2], list(range(8)), 4)
        eventually(lambda: service.post("/query", model_name="m", token_ids=list(range(8)))["scores"])
        yield service


def answered(served: Served, path: str, content: bytes) -> None:
    reply = served.client.post(path, content=content)
    assert reply.status_code < 500, reply.text
    value = reply.json()
    if reply.status_code >= 400:
        assert value["error"] and set(value) == {"error", "field", "fix"}, value
    elif path == "/register":
        for stream in value["streams"]:
            model, tenant, _, name = stream.split("/", 3)
            asked: dict[str, Any] = {"model_name": model, "tenant_id": tenant, "stream": name}
            body = json.loads(content)
            asked |= {"pool": body["pool"]} if body.get("pool") else {"instance_id": body["instance_id"]}
            served.client.post("/unregister", json=asked)


@settings(max_examples=MANY, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(path=st.sampled_from(PATHS), body=BODIES | CLOSE | VALUES)
def test_any_json(served: Served, path: str, body: object) -> None:
    answered(served, path, json.dumps(body).encode())


@settings(max_examples=MANY, suppress_health_check=[HealthCheck.too_slow])
@given(path=st.sampled_from(PATHS), body=CLOSE)
def test_nearly_right_json(served: Served, path: str, body: dict[str, object]) -> None:
    answered(served, path, json.dumps(body).encode())


@settings(max_examples=MANY)
@given(path=st.sampled_from(PATHS), content=st.binary(max_size=200))
def test_any_bytes(served: Served, path: str, content: bytes) -> None:
    answered(served, path, content)


def test_the_service_still_works(served: Served) -> None:
    """After all that."""
    text = list(range(50, 58))
    with Wire() as wire:
        served.register(instance_id="later", endpoint=wire.endpoint, stream="a stream of its own")
        eventually(
            lambda: all(one["status"] == "active" for one in served.get("/workers") if one["instance_id"] == "later")
        )
        wire.stored([1, 2], text, 4)
        eventually(lambda: served.post("/query", model_name="m", token_ids=text)["scores"] == {"later": {"0": 8}})


@pytest.mark.slow
def test_the_description_is_true() -> None:
    with Wire() as wire, Served(block_size=4) as service:
        service.register(instance_id=1, endpoint=wire.endpoint)
        assert check_description(service.url, 100) == 10
