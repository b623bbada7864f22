"""The queue: what is too much waits, in order; what is too much of that is refused, saying when to come again."""

from __future__ import annotations

import threading

import httpx
import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.server.gateway.support import PATIENCE, Gated, front, together
from tests.server.support import asking

from kvyard.engine.timing import FixedTiming
from kvyard.server.mock.config import Lora

pytestmark = pytest.mark.zmq

HALTING = {"timing": FixedTiming(prefill_ms=5, decode_ms=20)}


def holding(gated: Gated, count: int, release: threading.Event, model: str = "mock") -> list[threading.Thread]:
    """Streams that are open until ``release``; all have begun when this returns."""
    begun = threading.Semaphore(0)

    def hold() -> None:
        with httpx.Client(base_url=gated.url, timeout=PATIENCE, trust_env=False) as client:
            body = {"model": model, "prompt": "hold", "max_tokens": 1900, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as reply:
                parts = reply.iter_raw()  # kept: once it is gone, so is the connection
                next(parts)
                begun.release()
                release.wait(PATIENCE)

    threads = [threading.Thread(target=hold) for _ in range(count)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert begun.acquire(timeout=PATIENCE)
    return threads


def test_waiting_and_refusing() -> None:
    with front(1, mock={"engine": HALTING}, engine_requests=2, queue=3) as (gated, _):
        release = threading.Event()
        held = holding(gated, 2, release)
        answered: list[int] = []

        def ask(number: int) -> None:
            with httpx.Client(base_url=gated.url, timeout=PATIENCE, trust_env=False) as client:
                client.post("/v1/completions", json={"prompt": f"{number}", "max_tokens": 1}).raise_for_status()
                answered.append(number)

        waiting = []
        for number in range(3):
            thread = threading.Thread(target=ask, args=(number,))
            thread.start()
            waiting.append(thread)
            eventually(lambda: gated.client.get("/health").json()["queued"] == number + 1)  # noqa: B023
        refused = gated.complete("x", 429)
        assert refused.headers["retry-after"] == "1"
        assert (
            refused.json()["error"]["type"] == "RateLimitError"
            and "3 requests wait" in refused.json()["error"]["message"]
        )
        said = gated.post("/explain", 503, body={"prompt": "x"}).json()["error"]["message"]
        assert "no worker may be chosen" in said
        assert gated.metrics()['kvyard_gateway_queued{model="mock"}'] == 3
        release.set()
        for thread in (*held, *waiting):
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert sorted(answered) == [0, 1, 2]
        assert gated.metrics()['kvyard_gateway_queue_refused_total{model="mock"}'] == 1
        gated.idle()


def test_waiting_too_long() -> None:
    with front(1, mock={"engine": HALTING}, engine_requests=1, queue_seconds=0.3) as (gated, _):
        release = threading.Event()
        (held,) = holding(gated, 1, release)
        late = gated.complete("x", 503)
        assert "busy" in late.json()["error"]["message"] and late.headers["retry-after"] == "5"
        release.set()
        held.join(PATIENCE)
        gated.idle()
        assert gated.complete("x").status_code == 200


def test_a_request_that_leaves_the_queue_leaves_room() -> None:
    with front(1, mock={"engine": HALTING}, engine_requests=1, queue=1) as (gated, _):
        release = threading.Event()
        (held,) = holding(gated, 1, release)
        with asking(gated.url, "/v1/completions", prompt="x"):
            eventually(lambda: gated.client.get("/health").json()["queued"] == 1)
        eventually(lambda: gated.client.get("/health").json()["queued"] == 0)
        release.set()
        held.join(PATIENCE)
        assert gated.complete("x").status_code == 200
        gated.idle()


def test_no_queue_and_nobody_up() -> None:
    with front(1, queue=0) as (gated, served):
        httpx.post(f"{served.url}/admin/kill", json={}, trust_env=False)
        eventually(lambda: gated.engines()["worker0"]["state"] == "down")
        refused = gated.complete("x", 503)
        assert "no engine of model mock is up" in refused.json()["error"]["message"] and refused.headers["retry-after"]


def test_many_at_once_through_a_narrow_door() -> None:
    with front(2, engine_requests=1, queue=100) as (gated, _):
        found = together([lambda: gated.complete("x").status_code for _ in range(30)])
        assert found == [200] * 30
        gated.idle()


def test_requests_for_other_engines_are_not_held_up() -> None:
    """The first in the queue wants an adapter that only a busy engine has; the others don't, and go on."""
    lora = {"loras": (Lora(name="poet", path="/poet"),), "engine": HALTING}
    with front(2, mock=lora, engine_requests=1) as (gated, served):
        httpx.post(f"{served.urls[1]}/v1/unload_lora_adapter", json={"lora_name": "poet"}, trust_env=False)
        eventually(lambda: gated.engines()["worker1"]["models"] == ["mock"])
        release = threading.Event()
        (held,) = holding(gated, 1, release, model="poet")
        waiting = threading.Thread(target=lambda: gated.complete("y", model="poet"))
        waiting.start()
        eventually(lambda: gated.client.get("/health").json()["queued"] == 1)
        for _ in range(3):
            assert gated.complete("z", model="mock").headers["x-mock-worker"] == "worker1"
        assert gated.client.get("/health").json()["queued"] == 1
        release.set()
        for thread in (held, waiting):
            thread.join(PATIENCE)
            assert not thread.is_alive()
        gated.idle()


def test_sessions_with_less_service_go_first() -> None:
    """One session has had long answers; when room is scarce, the others go before it, and its header says so."""
    settings = {"flow": {"policy": "las", "options": {"wait_weight": 0}}}
    with front(1, mock={"engine": HALTING}, engine_requests=1, queue=9, **settings) as (gated, _):
        gated.complete("x" * 400, headers={"x-session-id": "greedy"}, max_tokens=20)
        release = threading.Event()
        (held,) = holding(gated, 1, release)
        answered: list[str] = []
        said: dict[str, str] = {}

        def ask(name: str) -> None:
            with httpx.Client(base_url=gated.url, timeout=PATIENCE, trust_env=False) as client:
                body = {"prompt": name, "max_tokens": 1}
                reply = client.post("/v1/completions", json=body, headers={"x-session-id": name})
                said[name] = reply.raise_for_status().headers["x-kvyard-decision"]
                answered.append(name)

        waiting = []
        for number, name in enumerate(("greedy", "quiet", "calm")):
            thread = threading.Thread(target=ask, args=(name,))
            thread.start()
            waiting.append(thread)
            eventually(lambda: gated.client.get("/health").json()["queued"] == number + 1)  # noqa: B023
        release.set()
        for thread in (held, *waiting):
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert answered == ["quiet", "calm", "greedy"]
        assert (
            "flow=las" in said["greedy"] and "overtaken=2" in said["greedy"] and "tokens of service" in said["greedy"]
        )


def test_a_tenant_that_floods_leaves_room_for_others() -> None:
    header = {"x-gateway-inference-fairness-id": "flood"}
    with front(1, mock={"engine": HALTING}, engine_requests=1, queue=4, flow={"policy": "fair"}) as (gated, _):
        release = threading.Event()
        (held,) = holding(gated, 1, release)
        waiting = [threading.Thread(target=lambda: gated.complete("x", headers=header)) for _ in range(2)]
        for number, thread in enumerate(waiting):
            thread.start()
            eventually(lambda: gated.client.get("/health").json()["queued"] == number + 1)  # noqa: B023
        refused = gated.complete("x", 429, headers=header)
        assert "tenant flood has 2 requests in the queue, with room for 2 more" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        other = threading.Thread(target=lambda: gated.complete("y"))
        other.start()
        eventually(lambda: gated.client.get("/health").json()["queued"] == 3)
        release.set()
        for thread in (held, *waiting, other):
            thread.join(PATIENCE)
            assert not thread.is_alive()
        gated.idle()
