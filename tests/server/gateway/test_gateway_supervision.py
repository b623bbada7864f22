"""What ends, comes back: tasks of the gateway that fail, a moment without file descriptors, and what health says meanwhile."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from pathlib import Path

import httpx
import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.server.gateway.support import PATIENCE, Gated, GatewayProcess, fleet, front

pytestmark = pytest.mark.zmq

PROMPT = list(range(800))


def codes(gated: Gated) -> set[str]:
    return {one["code"] for one in gated.client.get("/health").json()["reasons"]}


def test_health_says_what_is_missing() -> None:
    with Gated(ask_for_events=False) as gated:
        reply = gated.client.get("/ready")
        assert reply.status_code == 503 and reply.json()["live"] and not reply.json()["ready"]
        assert codes(gated) == {"no-engines"} and gated.client.get("/ping").status_code == 200
        with fleet() as served:
            gated.post("/admin/engines", 201, url=served.url, name="deaf")
            gated.ready(1)
            assert gated.client.get("/ready").status_code == 200
            health = gated.client.get("/health").json()
            assert health["status"] == "degraded" and codes(gated) == {"no-stream"}
            assert "knows nothing of its cache" in health["reasons"][0]["why"]
            assert gated.metrics()["kvyard_gateway_degraded"] == 1
        eventually(
            lambda: codes(gated) == {"no-engine-up", "engine-down"}
        )  # streams of an engine that is down say nothing
        assert gated.client.get("/ready").status_code == 503


def test_a_wrong_block_size_is_a_reason() -> None:
    with fleet() as served:
        (state,) = served.get("/admin/workers")
        (stream,) = state["streams"]
        engine = {"url": served.url, "events": stream["endpoint"], "replay": stream["replay_endpoint"]}
        with Gated(engines=[{**engine, "name": "e", "block_size": 32}]) as gated:
            gated.ready(1, 1)
            assert gated.client.get("/health").json()["status"] == "ok"
            gated.complete(PROMPT)
            eventually(lambda: codes(gated) == {"block-size"})
            (reason,) = gated.client.get("/health").json()["reasons"]
            assert reason["why"] == "its blocks have 16 tokens, and 32 were given"


def test_a_watch_that_fails_is_begun_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with front(1) as (gated, _):
        (engine,) = gated.gateway.members.engines.values()
        wait, failures = engine.look.wait, [3]

        async def fail() -> None:
            failures[0] -= 1
            if failures[0] >= 0:
                raise RuntimeError("a bug")
            await wait()

        monkeypatch.setattr(engine.look, "wait", fail)
        eventually(lambda: failures[0] < 0)
        assert gated.gateway.supervisor.failures == 3
        assert caplog.text.count("is begun again: RuntimeError: a bug") == 1
        gated.complete(PROMPT)


def test_a_moment_without_file_descriptors(tmp_path: Path) -> None:
    """All streams come back, requests are answered again, and the log stays short."""
    with fleet(workers=2) as served, GatewayProcess("--fleet", served.url, "--tokenizer", "bytes") as process:
        with httpx.Client(base_url=process.url, timeout=PATIENCE) as client:

            def fresh() -> bool:
                return bool(client.get("/health").json()["streams"].get("fresh") == 2)

            eventually(fresh)
            pid = process.process.pid
            before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            used = len(os.listdir(f"/proc/{pid}/fd"))
            address = httpx.URL(process.url)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (used, before[1]))
            with contextlib.ExitStack() as stack:
                for _ in range(100):
                    stack.enter_context(socket.create_connection((str(address.host), address.port or 0)))
                for number in range(2):  # its streams begin again, for which sockets are needed
                    served.inside(lambda number=number: served.fleet.do_later(0, served.fleet.kill, number, 0.2))
                eventually(lambda: "out of system resource" in process.text)
                eventually(lambda: all(worker.alive and worker.deaths for worker in served.fleet.workers))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
            eventually(lambda: fresh() and client.get("/health").json()["status"] == "ok", lambda: process.text[-3000:])
            for _ in range(2):
                body = {"prompt": PROMPT, "max_tokens": 2}
                assert client.post("/v1/completions", json=body).status_code == 200
        assert len(process.text) < 100_000, "a log that fills disks"


def test_prompts_longer_than_any_engine_takes_are_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvyard.index import Identity

    hashed: list[int] = []
    chain = Identity.chain

    def watched(self: Identity, parent: int | None, start: int, tokens: list[int], marks: list[object]) -> list[int]:
        hashed.append(len(tokens))
        return chain(self, parent, start, tokens, marks)  # type: ignore[arg-type]

    with front(1, mock={"engine": {"max_model_len": 50_000, "num_gpu_blocks": 8_000}}) as (gated, _):
        (card,) = gated.client.get("/v1/models").json()["data"]
        assert card["max_model_len"] == 50_000 and card["root"] == card["id"]
        monkeypatch.setattr(Identity, "chain", watched)
        gated.complete([1] * 60_000, 400)
        assert not hashed
        gated.complete([1] * 40_000)
        assert max(hashed) <= 2048 * 16 and sum(hashed) >= 40_000, "by turns"
