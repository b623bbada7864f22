"""Flow control before prefill engines: tenants, priorities and sessions order what waits there as in a pool without roles."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.server.gateway.scripted_engine import ScriptedEngine, answer, chunked
from tests.server.gateway.support import PATIENCE, Gated, fleet, together

from kvyard.openai import COMPLETIONS
from kvyard.server.gateway.pool import EnginePool

TENANT = "x-gateway-inference-fairness-id"
HELD = "hold"
"""A prompt whose prefill engine waits for the test."""


class Split:
    """A gateway before a prefill engine and two decode engines, and what their clients were told."""

    def __init__(self, gated: Gated, prefill: ScriptedEngine, release: threading.Event) -> None:
        self.gated, self.prefill, self.release = gated, prefill, release
        self.replies: dict[str, httpx.Response] = {}
        self._clients: list[threading.Thread] = []

    @property
    def pool(self) -> EnginePool:
        """The prefill pool."""
        (pool,) = self.gated.gateway.members.pools.values()
        assert pool.prefill_pool is not None
        return pool.prefill_pool

    @property
    def computed(self) -> list[str]:
        """Prompts that the prefill engine was asked to compute, in order."""
        return [json.loads(body)["prompt"] for _, body in self.prefill.requests]

    def ask(self, prompt: str, headers: dict[str, str] | None = None, **body: Any) -> None:
        """Have a client of its own ask."""

        def client() -> None:
            with httpx.Client(base_url=self.gated.url, timeout=PATIENCE, trust_env=False) as own:
                body_ = {"model": "odd", "prompt": prompt, "max_tokens": 7, **body}
                self.replies[prompt] = own.post(COMPLETIONS, json=body_, headers=headers)

        self._clients.append(threading.Thread(target=client))
        self._clients[-1].start()

    def hold(self, headers: dict[str, str] | None = None) -> None:
        """Ask for a prompt that the prefill engine has until ``finish``."""
        self.ask(HELD, headers)
        eventually(lambda: HELD in self.computed)

    def waits(self, count: int) -> None:
        """Wait until ``count`` requests wait before the prefill engine."""
        eventually(lambda: len(self.pool.waiting) == count, lambda: (len(self.pool.waiting), self.computed))

    def finish(self) -> None:
        """Let the held prompt be computed, and wait for all answers."""
        self.release.set()
        for client in self._clients:
            client.join(PATIENCE)
            assert not client.is_alive()
        assert {reply.status_code for reply in self.replies.values()} == {200}
        self._clients.clear()


@contextlib.contextmanager
def split(fails: Callable[[str], bool] = lambda prompt: False, **settings: Any) -> Iterator[Split]:
    release = threading.Event()

    def computes(head: str, body: bytes) -> Sequence[bytes]:
        prompt = json.loads(body)["prompt"]
        if prompt == HELD:
            release.wait(PATIENCE)
        if fails(prompt):
            return [answer("500 Internal Server Error", b"{}")]
        return [answer("200 OK", b'{"id":"x","kv_transfer_params":{"do_remote_prefill":true}}')]

    def answers(head: str, body: bytes) -> Sequence[bytes]:
        return chunked(b'data: {"text":"hi"}\n\n', b"data: [DONE]\n\n")

    with ScriptedEngine(computes) as prefill, ScriptedEngine(answers) as first, ScriptedEngine(answers) as second:
        roles = ((prefill, "prefill"), (first, "decode"), (second, "decode"))
        engines = [{"url": engine.url, "name": f"e{at}", "role": role} for at, (engine, role) in enumerate(roles)]
        with Gated(engines=engines, router={"policy": "round-robin"}, **settings) as gated:
            try:
                yield Split(gated.ready(3), prefill, release)
                gated.idle()
            finally:
                release.set()


def test_priorities_order_prompts_that_wait() -> None:
    with split(engine_requests=1, queue=9, flow={"policy": "priority"}) as asked:
        asked.hold()
        for number, (prompt, priority) in enumerate((("late", 2), ("first", -1), ("second", 0))):
            asked.ask(prompt, priority=priority)
            asked.waits(number + 1)
        asked.finish()
        assert asked.computed == [HELD, "first", "second", "late"]
        said = asked.replies["late"].headers["x-kvyard-prefill"]
        assert "flow=priority" in said and "overtaken=2" in said and "its priority is 2" in said


def test_tenants_share_prefill_engines() -> None:
    with split(engine_requests=1, queue=9, flow={"policy": "fair"}) as asked:
        asked.hold({TENANT: "flood"})
        for number, (prompt, tenant) in enumerate((("f1", "flood"), ("f2", "flood"), ("quiet", "calm"))):
            asked.ask(prompt, {TENANT: tenant})
            asked.waits(number + 1)
        asked.finish()
        assert asked.computed == [HELD, "quiet", "f1", "f2"]


def test_a_tenant_with_its_prompts_at_prefill_engines_waits_while_others_go() -> None:
    with split(engine_requests=4, queue=9, flow={"tenant_requests": 1}) as asked:
        asked.hold({TENANT: "flood"})
        asked.ask("more", {TENANT: "flood"})
        asked.waits(1)
        asked.ask("calm", {TENANT: "calm"})
        eventually(lambda: "calm" in asked.replies)
        assert asked.computed == [HELD, "calm"] and len(asked.pool.waiting) == 1
        asked.finish()
        assert asked.computed == [HELD, "calm", "more"]
        assert "a tenant has 1 requests at workers at most" in asked.replies["more"].headers["x-kvyard-prefill"]


def test_prompts_of_a_session_are_service() -> None:
    with split(engine_requests=1, queue=9, flow={"policy": "las", "options": {"wait_weight": 0}}) as asked:
        asked.ask("x" * 400, {"x-session-id": "greedy"})
        asked.finish()
        asked.release.clear()
        asked.hold()
        for number, session in enumerate(("greedy", "calm")):
            asked.ask(session, {"x-session-id": session})
            asked.waits(number + 1)
        asked.finish()
        assert asked.computed[-3:] == [HELD, "calm", "greedy"]
        assert "tokens of service" in asked.replies["greedy"].headers["x-kvyard-prefill"]


def test_a_prefill_engine_that_fails_takes_no_place_of_its_tenant() -> None:
    """The decode engine computes these itself; the tenant's next prompt goes to the prefill engine again."""
    settings = {"flow": {"tenant_requests": 1}, "queue_seconds": PATIENCE}
    with split(lambda prompt: prompt == "bad", engine_requests=4, **settings) as asked:
        for prompt in ("bad", "good"):
            asked.ask(prompt, {TENANT: "one"})
            asked.finish()
        eventually(lambda: asked.gated.engines()["e0"]["state"] == "ready")
        asked.ask("later", {TENANT: "one"})
        asked.finish()
        assert "x-kvyard-prefill" not in asked.replies["bad"].headers
        assert "x-kvyard-prefill" in asked.replies["later"].headers


@pytest.mark.zmq
@pytest.mark.parametrize("transfer", ["vllm", "sglang"])
def test_many_tenants_on_mock_engines_leave_no_place_taken(transfer: str) -> None:
    """Each has one place at workers with either role; all are answered, and another round of all finds room."""
    settings = {"flow": {"policy": "fair", "tenant_requests": 1}, "disaggregation": {"transfer": transfer}}
    with fleet(prefill=1, decode=1, speed=5.0, engine={"bytes_per_block": 2 << 20}) as served:
        with Gated(fleets=[served.url], engine_requests=2, queue=64, queue_seconds=PATIENCE, **settings) as gated:
            gated.ready(2, 2)

            def complete(number: int) -> httpx.Response:
                with httpx.Client(base_url=gated.url, timeout=PATIENCE, trust_env=False) as own:
                    body = {"prompt": [number] * 100, "max_tokens": 3}
                    return own.post(COMPLETIONS, json=body, headers={TENANT: f"t{number % 3}"})

            for _ in range(2):
                deeds = [lambda number=number: complete(number) for number in range(12)]
                for reply in together(deeds):  # type: ignore[arg-type]
                    assert reply.status_code == 200 and "worker=p0" in reply.headers["x-kvyard-prefill"]
            gated.idle()
