"""Whatever is sent, something sensible is answered: never a 500, never silence, and the books stay right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("httptools", reason="needs kvyard[server]")

from tests.server.mock.support import Served
from tests.server.threaded import check_description

from kvyard.engine.timing import FixedTiming

MANY = max(40, settings.default.max_examples // 2)
PATHS = (
    "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter", "/admin/faults", "/admin/revive", "/reset_prefix_cache", "/close_session", "/kv_transfer",
    "/v1/chat/completions/batch", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings",
)  # fmt: skip
"""All that take a body, but for those that are meant to break something."""
WORDS = [
    "model", "prompt", "messages", "role", "content", "n", "stream", "stream_options", "include_usage", "stop",
    "max_tokens", "max_completion_tokens", "min_tokens", "seed", "logprobs", "top_logprobs", "echo", "tools", "type",
    "function", "name", "parameters", "tool_choice", "response_format", "json_schema", "schema", "cache_salt", "tokens",
    "lora_name", "lora_path", "priority", "temperature", "stop_token_ids", "error_rate", "worker", "return_token_ids",
    "kv_transfer_params", "bootstrap_room", "request_ids", "what",
    "input", "instructions", "max_output_tokens", "previous_response_id", "system", "stop_sequences", "dimensions",
]  # fmt: skip
ATOMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-1, 300)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["mock", "user", "system", "text", "function", "auto", "required", "json_object", "json_schema"])
)
VALUES = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=5), inner, max_size=6)
    ),
    max_leaves=20,
)
SCHEMA = st.fixed_dictionaries(
    {"type": st.sampled_from(["object", "string", "array", 5])}, optional={"properties": VALUES}
)
COMMON: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["mock", "lora", "x", None]),
    "n": st.none() | st.integers(-1, 5),
    "stream": st.booleans(),
    "stream_options": st.none() | st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
    "stop": st.none() | st.text(max_size=3) | st.lists(st.text(max_size=2), max_size=3),
    "max_tokens": st.none() | st.integers(-1, 60) | st.integers(),
    "min_tokens": st.integers(-1, 10),
    "ignore_eos": st.booleans(),
    "seed": st.none() | st.integers(),
    "temperature": st.none() | st.floats(-1, 3),
    "cache_salt": st.none() | st.text(max_size=4),
    "priority": st.integers(),
    "stop_token_ids": st.lists(st.integers(), max_size=3),
    "return_token_ids": st.booleans(),
    "response_format": st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "json_object", "json_schema", "x"])},
        optional={"json_schema": st.fixed_dictionaries({}, optional={"schema": SCHEMA})},
    ),
}
TEXT = st.text(max_size=20)
DURATION = st.none() | st.floats() | st.integers(-5, 1 << 70)
HINTS = {
    "session_id": TEXT,
    "retention_directives": st.lists(
        st.fixed_dictionaries(
            {"priority": st.integers(-1, 101)},
            optional={"start": st.integers(-1, 99), "end": st.none() | st.integers(-1, 99), "duration": DURATION},
        ),
        max_size=3,
    ),
    "kv_cache_retention_config": st.fixed_dictionaries(
        {}, optional={"decode_retention_priority": st.integers(-1, 101), "decode_duration_ms": DURATION}
    ),
    "nvext": st.fixed_dictionaries(
        {},
        optional={
            "agent_hints": st.fixed_dictionaries({"priority": st.integers(-(1 << 70), 1 << 70)}),
            "cache_control": st.fixed_dictionaries({"ttl": DURATION | st.sampled_from(["5m", "0s", "soon", ""])}),
            "session_control": st.fixed_dictionaries({"action": st.sampled_from(["open", "close", "x"])}),
        },
    ),
}
COMPLETION = st.fixed_dictionaries(
    {"prompt": TEXT | st.lists(st.integers(-1, 1 << 33), max_size=60) | st.lists(TEXT, max_size=3)},
    optional={**COMMON, **HINTS, "logprobs": st.none() | st.integers(-1, 21), "echo": st.booleans()},
)
TOOL = st.fixed_dictionaries(
    {"type": st.sampled_from(["function", "x"])},
    optional={"function": st.fixed_dictionaries({"name": TEXT}, optional={"parameters": SCHEMA})},
)
CHAT = st.fixed_dictionaries(
    {
        "messages": st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(["user", "assistant", "tool", "system"])},
                optional={
                    "content": TEXT
                    | st.lists(st.fixed_dictionaries({"type": st.just("text")}, optional={"text": TEXT}), max_size=2),
                    "tool_calls": st.lists(st.dictionaries(TEXT, VALUES, max_size=2), max_size=2),
                },
            ),
            max_size=4,
        )
    },
    optional={
        **COMMON,
        "logprobs": st.booleans(),
        "top_logprobs": st.none() | st.integers(-1, 21),
        "tools": st.lists(TOOL, max_size=3),
        "tool_choice": st.sampled_from(["auto", "none", "required", "x"]) | st.dictionaries(TEXT, VALUES, max_size=2),
    },
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    quick = {"timing": FixedTiming(prefill_ms=0.02, decode_ms=0.01), "scheduling_policy": "priority"}
    with Served(engine=quick, tool_call_rate=1.0) as fleet:
        fleet.post("/v1/load_lora_adapter", lora_name="lora", lora_path="/x")
        yield fleet
        fleet.check()


def answered(served: Served, path: str, content: bytes) -> None:
    reply = served.client.post(path, content=content)
    assert reply.status_code < 500, (reply.status_code, reply.text)
    if reply.status_code >= 400:
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    elif reply.headers["content-type"].startswith("text/event-stream"):
        assert reply.text.endswith("data: [DONE]\n\n")
        for line in reply.text.split("\n"):  # and at nothing else that Python takes for a line's end
            if line and line != "data: [DONE]":
                json.loads(line.removeprefix("data: "))
    elif path.startswith("/v1/c"):
        found = reply.json()
        assert found["usage"]["completion_tokens"] > 0 and all(one["finish_reason"] for one in found["choices"])
    if path == "/admin/faults":
        calm = {"error_rate": 0, "latency_ms": 0, "abort_rate": 0, "stall_rate": 0, "event_loss": 0}
        assert served.client.post(path, json=calm).status_code == 200


@settings(max_examples=MANY, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(path=st.sampled_from(PATHS), body=st.dictionaries(st.sampled_from(WORDS), VALUES, max_size=8) | VALUES)
def test_any_json(served: Served, path: str, body: object) -> None:
    answered(served, path, json.dumps(body).encode())


@settings(max_examples=2 * MANY, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(body=COMPLETION)
def test_nearly_right_completions(served: Served, body: dict[str, object]) -> None:
    answered(served, "/v1/completions", json.dumps(body).encode())


@settings(max_examples=2 * MANY, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(body=CHAT)
def test_nearly_right_chats(served: Served, body: dict[str, object]) -> None:
    answered(served, "/v1/chat/completions", json.dumps(body).encode())


@settings(max_examples=MANY)
@given(path=st.sampled_from(PATHS), content=st.binary(max_size=200))
def test_any_bytes(served: Served, path: str, content: bytes) -> None:
    answered(served, path, content)


def test_every_route_is_described(served: Served) -> None:
    described = served.get("/openapi.json")
    taking = {path for path, methods in described["paths"].items() if "requestBody" in methods.get("post", {})}
    assert taking - {"/admin/kill", "/admin/stall"} <= set(PATHS)
    for path, methods in described["paths"].items():
        if "get" in methods and "{" not in path:
            reply = served.client.get(path)
            assert reply.status_code == 200
            media = reply.headers.get("content-type", "").partition(";")[0]
            content = methods["get"]["responses"]["200"]["content"]
            assert media in content if content else not media, path


@pytest.mark.slow
def test_the_description_is_true() -> None:
    with Served(engine={"timing": FixedTiming(prefill_ms=0.02, decode_ms=0.01)}) as fleet:
        check_description(fleet.url, 60, without=("/admin/kill", "/admin/stall", "/admin/faults"))
        fleet.check()
