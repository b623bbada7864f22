"""Hints over HTTP, by every engine's name for them: who is evicted changes, and what makes no sense is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("httptools", reason="needs kvyard[server]")

from tests.server.gateway.support import front
from tests.server.mock.support import Served

from kvyard.blocks import Hints, Retention
from kvyard.clock import SECOND
from kvyard.openai import CompletionRequest
from kvyard.replay.live.prompts import body_of
from kvyard.replay.traces import TraceRequest, open_trace
from kvyard.server.hinting import read_hints
from kvyard.server.mock.config import make_config

SMALL = {"num_gpu_blocks": 14, "heed_hints": True}
FIRST, OTHER, THIRD = (list(range(base, base + 100)) for base in (1000, 2000, 3000))
"""Seven blocks each, one of them partial: the third takes the room of most of one other."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(engine=SMALL) as fleet:
        yield fleet
        fleet.check()


def left(served: Any, first: dict[str, Any], second: dict[str, Any], close: str | None = None) -> int:
    """How much of the first prompt is cached after the other two, which say these things."""
    served.client.post("/reset_prefix_cache")
    served.complete(FIRST, max_tokens=1, **first)
    served.complete(OTHER, max_tokens=1, **second)
    if close is not None:
        served.post("/close_session", session_id=close)
    served.complete(THIRD, max_tokens=1)
    reply = served.complete(FIRST, max_tokens=1)
    reply = reply if isinstance(reply, dict) else reply.json()
    found: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


RANGE = {"retention_directives": [{"start": 0, "end": None, "priority": 80}]}
KEEPS_FIRST: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("vLLM 38514: a range is worth more", RANGE, {}),
    ("the other range is worth less", {}, {"retention_directives": [{"priority": 3, "duration": 60}]}),
    (
        "TensorRT-LLM: the same",
        {"kv_cache_retention_config": {"token_range_retention_configs": [{"token_end": 96, "priority": 100}]}},
        {},
    ),
    ("Dynamo: the agent's priority", {"nvext": {"agent_hints": {"priority": 20, "osl": 5}}}, {}),
    ("Dynamo: the other's priority", {}, {"nvext": {"agent_hints": {"priority": -5}}}),
    ("Dynamo: a time to live", {"nvext": {"cache_control": {"type": "ephemeral", "ttl": "5m"}}}, {}),
    ("vLLM 52113: a time to live", {"agent_hint": {"session_id": "a", "cache_control": {"ttl": 300}}}, {}),
    ("Dynamo: a session closes", {}, {"nvext": {"session_control": {"session_id": "b", "action": "close"}}}),
]


@pytest.mark.parametrize(("first", "second"), [case[1:] for case in KEEPS_FIRST], ids=[case[0] for case in KEEPS_FIRST])
def test_a_hint_changes_who_is_evicted(served: Served, first: dict[str, Any], second: dict[str, Any]) -> None:
    assert left(served, {}, {}) == 16, "without it, the first that came goes"
    assert left(served, first, second) == 96


@pytest.mark.parametrize("how", ["body", "header", "vllm_xargs"])
def test_a_session_that_is_closed_later(served: Served, how: str) -> None:
    """SGLang's way: requests say whose they are, and a call says that it is over."""
    said: dict[str, Any] = {"body": {"session_id": "b"}, "vllm_xargs": {"vllm_xargs": {"session_id": "b"}}}.get(how, {})
    if how == "header":
        served.client.headers["X-Session-ID"] = "b"
        try:
            served.client.post("/reset_prefix_cache")
            served.complete(OTHER, max_tokens=1)
        finally:
            del served.client.headers["X-Session-ID"]
        served.complete(FIRST, max_tokens=1)
        served.post("/close_session", session_id="b")
        served.complete(THIRD, max_tokens=1)
        assert served.cached(FIRST) == 96
        return
    assert left(served, {}, said, close="other") == 16
    assert left(served, {}, said, close="b") == 96


def test_shared_blocks_survive_the_end_of_a_session(served: Served) -> None:
    served.client.post("/reset_prefix_cache")
    served.complete([*FIRST[:64], 1, 2, 3], max_tokens=1, session_id="a")
    served.complete([*FIRST[:64], 4, 5, 6], max_tokens=1, session_id="b")
    served.post("/close_session", session_id="b")
    served.complete(THIRD, max_tokens=1)
    assert served.cached(FIRST[:65]) == 64


@pytest.mark.parametrize(("config", "found"), [({}, 96), ({"decode_retention_priority": 0}, 64)])
def test_answers_can_be_worth_less(served: Served, config: dict[str, Any], found: int) -> None:
    served.client.post("/reset_prefix_cache")
    served.complete(OTHER, max_tokens=1)
    ask = {"max_tokens": 40, "ignore_eos": True, "return_token_ids": True, "kv_cache_retention_config": config}
    said = served.complete(FIRST[:64], **ask)["choices"][0]["token_ids"]
    served.complete(THIRD[:50], max_tokens=1)
    assert served.cached([*FIRST[:64], *said, 5]) == found


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"retention_directives": [{"priority": 101}]}, "0 to 100"),
        ({"retention_directives": [{"start": 8, "end": 4, "priority": 1}]}, "at least one token"),
        ({"retention_directives": [{"priority": 1, "duration": -2}]}, "lasts from 0"),
        ({"retention_directives": "all"}, "array"),
        ({"kv_cache_retention_config": {"decode_retention_priority": -1}}, "0 to 100"),
        ({"nvext": {"cache_control": {"ttl": "soon"}}}, "30s, 5m or 1h"),
        ({"nvext": {"cache_control": {"ttl": -1}}}, "above 0"),
        ({"nvext": {"cache_control": {"type": "eternal"}}}, "eternal"),
        ({"nvext": {"session_control": {"action": "explode"}}}, "explode"),
        ({"nvext": {"session_control": {"action": "close"}, "cache_control": {}}}, "not both"),
        ({"session_id": 5}, "session_id"),
        ({"session_id": "a\0b"}, "NUL"),
    ],
)
def test_malformed_hints_are_refused_in_a_sentence(served: Served, body: dict[str, Any], why: str) -> None:
    reply = served.client.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 1, **body})
    assert reply.status_code == 400, reply.text
    said = reply.json()["error"]["message"]
    assert "\n" not in said
    assert why in reply.text


def test_a_mock_uses_hints_unless_configured_otherwise() -> None:
    assert make_config({}).engine.heed_hints
    assert not make_config({"heed_hints": "false"}).engine.heed_hints
    with Served(engine={"num_gpu_blocks": 14}) as deaf:
        assert left(deaf, RANGE, {}) == 16


def test_a_gateway_passes_hints_on_untouched() -> None:
    with front(1, mock={"engine": SMALL}) as (gate, mocks):
        mocks.client.post("/reset_prefix_cache")
        gate.complete(FIRST, max_tokens=1, **RANGE)
        gate.complete(OTHER, max_tokens=1)
        gate.complete(THIRD, max_tokens=1)
        assert mocks.cached(FIRST) == 96
        mocks.client.post("/reset_prefix_cache")
        gate.complete(FIRST, max_tokens=1)
        gate.complete(OTHER, headers={"X-Session-ID": "b"}, max_tokens=1)
        told = gate.post("/close_session", session_id="b").json()
        assert len(told["engines"]) == 1
        gate.complete(THIRD, max_tokens=1)
        assert mocks.cached(FIRST) == 96
        wrong = gate.post("/v1/completions", 400, prompt=[1], nvext={"cache_control": {"ttl": "soon"}})
        assert "30s, 5m or 1h" in wrong.json()["error"]["message"], "the engine's own words"


def test_a_recording_has_the_hints_under_names_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "seen.jsonl"
    said: list[dict[str, Any]] = [
        {"session_id": "secret"},
        {"session_id": "secret", "nvext": {"session_control": {"action": "close"}}},
        {"nvext": {"cache_control": {"ttl": "1m"}}, **RANGE},
        {},
    ]
    with front(1, mock={"engine": SMALL}, record=str(path)) as (gate, _):
        for body in said:
            gate.complete(OTHER, max_tokens=1, **body)
        gate.post("/v1/completions", 400, prompt=OTHER, nvext={"cache_control": {"ttl": "soon"}})
    assert "secret" not in path.read_text()
    assert [one.hints for one in open_trace(path)] == [
        Hints("c1"),
        Hints("c1", session_end=True),
        Hints("", ttl=60 * SECOND, retention=(Retention(0, None, 80),)),
        Hints(),
    ]


def test_a_live_replay_sends_the_traces_hints() -> None:
    said = [
        Hints("a", session_end=True),
        Hints("b", ttl=90 * SECOND),
        Hints("b", ttl=90 * SECOND, ttl_then="first"),
        Hints("c", retention=(Retention(0, 64, 80, 30 * SECOND), Retention(64, None, 10))),
        Hints("", session_end=True),
    ]
    for hints in said:
        row = TraceRequest("r", 0, 3, 1, hints=hints)
        body = msgspec.json.decode(body_of(row, [1, 2, 3], "mock"), type=CompletionRequest)
        assert read_hints(body, {}).of(3) == hints
