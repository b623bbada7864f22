"""Requests that mean no good, or know no better: others don't notice, and nothing grows by them."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.waiting import eventually

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.server.gateway.scripted_engine import ScriptedEngine, answer, gated, plain
from tests.server.gateway.support import PATIENCE, front

from kvyard.server.gateway.sessions import LONG_NAME

pytestmark = pytest.mark.zmq


def test_a_name_that_somebody_guessed_is_not_given_again() -> None:
    """Names that are made here can be foretold: whoever takes the next one must not break another's request."""
    held = threading.Event()

    def script(head: str, body: bytes) -> Sequence[bytes]:
        if b"hold" in body:
            held.wait(PATIENCE)
        return plain(head, body)

    with ScriptedEngine(script) as engine, gated(engine) as gate:
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


def test_requests_with_the_same_name_that_are_read_at_the_same_time(tmp_path: Path) -> None:
    """A long body is read in several turns, in which another request may bring the same name."""
    with ScriptedEngine(plain) as engine, gated(engine, record=str(tmp_path / "recording.jsonl")) as gate:
        gate.ready(1)
        with ThreadPoolExecutor(8) as threads:
            for _ in threads.map(
                lambda at: gate.complete(f"{at}" * 300_000, headers={"x-request-id": "same"}), range(8)
            ):
                pass
        assert (
            len({head.lower().partition("x-request-id: ")[2].partition("\r\n")[0] for head, _ in engine.requests}) > 1
        )
        gate.idle()


def test_all_bodies_together_are_bounded() -> None:
    held = threading.Event()

    def script(head: str, body: bytes) -> Sequence[bytes]:
        held.wait(PATIENCE)
        return plain(head, body)

    long = "x" * 400_000
    with ScriptedEngine(script) as engine, gated(engine, held_bytes=1 << 20, tokenizer="bytes") as gate:
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
        assert gate.gateway.held.bytes == 0
        assert gate.complete(long).status_code == 200
        assert gate.metrics()['kvyard_gateway_requests_total{model="",outcome="refused"}'] == 1


def test_many_texts_are_not_many_questions() -> None:
    """The engine is asked for the tokens of one of them, however many there are."""

    def script(head: str, body: bytes) -> Sequence[bytes]:
        return [answer("200 OK", json.dumps({"tokens": list(range(40))}).encode() if "/tokenize" in head else b"{}")]

    with ScriptedEngine(script) as engine, gated(engine, tokenizer="engine") as gate:
        gate.ready(1)
        gate.complete(["x" * 80] * 500)
        asked = [head for head, _ in engine.requests if "/tokenize" in head]
        assert len(asked) == 1
        assert gate.metrics()['kvyard_gateway_prompt_tokens_total{model="odd"}'] == 500 * 40


def test_odd_prompts_are_the_engines_to_judge() -> None:
    with ScriptedEngine(plain) as engine, gated(engine) as gate:
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
        assert len(bound) == 2 and "short" in bound and max(map(len, bound)) < LONG_NAME
        assert "why=session" in gate.complete("x", headers={"x-session-id": long}).headers["x-kvyard-decision"]


def test_a_policy_that_looks_at_no_prompts_reads_none() -> None:
    """It asks no engine for tokens, and the engine's own count of them is what is counted."""
    said = (
        b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":0}}}'
    )
    for policy, asked in (("round-robin", False), ("kv", True)):
        with (
            ScriptedEngine(lambda head, body: [answer("200 OK", said)]) as engine,
            gated(engine, tokenizer="engine", router={"policy": policy}) as gate,
        ):
            gate.ready(1)
            gate.post("/v1/chat/completions", model="odd", messages=[{"role": "user", "content": "x"}])
            gate.complete("some text")
            gate.idle()
            assert any("/tokenize" in head for head, _ in engine.requests) is asked
            if not asked:
                assert gate.gateway.traffic.counters.prompt_tokens == 14
