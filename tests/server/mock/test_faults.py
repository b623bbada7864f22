"""Faults on demand, by flag, header and route; and limits that hold."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest
from tests.waiting import eventually

pytest.importorskip("httptools", reason="needs kvyard[server]")

from tests.server.mock.support import LOOPBACK, Served
from tests.server.support import asking

from kvyard.errors import KvyardError
from kvyard.events.types import EventBatch
from kvyard.server.http import Bounds
from kvyard.server.mock.faults import MockFaults, asked, changed, is_lost


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served() as fleet:
        yield fleet
        fleet.check()


def fault(text: str) -> dict[str, str]:
    return {"X-Mock-Fault": text}


def test_an_error_by_header(served: Served) -> None:
    for status in (429, 503, 422):
        said = served.complete("x", status, fault(f"error={status}"))["error"]
        assert said["code"] == status
    served.complete("x")
    for text in ("error", "error=200", "nonsense=1", "latency_ms=-1", "latency_ms=nan"):
        assert served.complete("x", 400, fault(text))["error"]["type"] == "Bad Request"


def test_an_error_rate_by_route(served: Served) -> None:
    assert served.post("/admin/faults", error_rate=1.0, error_status=503)["error_rate"] == 1.0
    assert served.complete("x", 503)["error"]["type"] == "ServiceUnavailableError"
    assert served.get("/admin/faults")["error_status"] == 503
    served.post("/admin/faults", error_rate=0)
    served.complete("x")
    for bad in ({"error_rate": 2}, {"error_status": 200}, {"nonsense": 1}, {"latency_ms": "x"}):
        assert served.post("/admin/faults", 400, **bad)["error"]["message"]
    assert served.get("/admin/faults")["error_rate"] == 0


def test_latency(served: Served) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    with pytest.raises(httpx.TimeoutException):
        served.client.post("/v1/completions", json=body, headers=fault("latency_ms=60000"), timeout=0.1)
    served.complete("x", headers=fault("latency_ms=1"))


@pytest.mark.parametrize("stream", [True, False])
def test_a_connection_that_is_cut(served: Served, stream: bool) -> None:
    body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": stream}
    with pytest.raises(httpx.TransportError):
        served.client.post("/v1/completions", json=body, headers=fault("abort_after=3"))
    served.check()


def test_a_stream_that_falls_silent(served: Served) -> None:
    body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True}
    header = "".join(f"{name}: {value}\r\n" for name, value in fault("stall_after=3").items())
    seen = b""
    with asking(served.url, "/v1/completions", header, **body) as line:
        while b"data: " not in seen:  # one or more tokens each, as the machine is busy
            seen += line.recv(1 << 16)
        line.settimeout(1.0)
        with pytest.raises(TimeoutError):
            while part := line.recv(1 << 16):
                seen += part
    assert b"[DONE]" not in seen
    served.check()


def test_kill_for_a_while_resets_open_streams() -> None:
    with Served(workers=2, speed=0.1) as served:
        body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=served.urls[1], timeout=30, trust_env=False) as other:
            with pytest.raises(httpx.TransportError):
                with other.stream("POST", "/v1/completions", json=body) as reply:
                    lines = reply.iter_lines()
                    next(lines)
                    served.post("/admin/kill", worker=1, seconds=0.3)
                    for _ in lines:
                        pass
        eventually(lambda: served.get("/admin/workers")[1]["alive"])
        assert httpx.get(f"{served.urls[1]}/health", trust_env=False).status_code == 200
        served.post("/admin/kill", 400, worker=2)
        served.post("/admin/kill", 400, seconds=-1)
        # By header, the worker that is asked.
        with pytest.raises(httpx.TransportError):
            httpx.post(
                f"{served.urls[1]}/v1/completions",
                json={**body, "stream": False},
                headers=fault("kill"),
                timeout=30,
                trust_env=False,
            )
        eventually(lambda: not served.get("/admin/workers")[1]["alive"])
        served.post("/admin/revive", worker=1)
        served.post("/admin/revive", worker=0)
        served.check()


def test_kill_by_flag() -> None:
    with Served(faults=MockFaults(kill_after_s=0.2)) as served:

        def dead() -> bool:
            try:
                return not httpx.get(f"{served.url}/health", trust_env=False)
            except httpx.TransportError:
                return True

        eventually(dead)


def test_unknown_faults_are_refused() -> None:
    assert asked("latency_ms=5, abort_after=2").abort_after == 2
    assert changed(MockFaults(), {"event_loss": 0.5}).event_loss == 0.5
    for given in ({"x": 1}, {"error_rate": "a"}, {"error_status": 600}, {"kill_after_s": -1}):
        with pytest.raises(KvyardError):
            changed(MockFaults(), given)


def test_the_same_seed_injects_the_same_faults() -> None:
    """Events of two ranks are published by threads of their own while requests are drawn on the loop."""

    def run(seed: int, late: float = 0.0) -> tuple[list[int], list[list[int]]]:
        faults = MockFaults(error_rate=0.3, error_status=503, event_loss=0.4)
        with Served(workers=1, dp_size=2, events_endpoint=LOOPBACK, faults=faults, seed=seed) as served:
            worker = served.fleet.workers[0]
            lost: list[list[int]] = [[], []]
            withheld = worker.publishers[0].withhold
            assert withheld is not None

            def noted(batch: EventBatch) -> bool:
                threading.Event().wait(late)
                found = withheld(batch)
                if found:
                    lost[batch.rank or 0].append(batch.seq)
                return found

            for publisher in worker.publishers:
                publisher.withhold = noted
            body = {"max_tokens": 2, "ignore_eos": True}
            statuses = []
            for number in range(40):
                headers = {"X-data-parallel-rank": str(number % 2)}
                reply = served.client.post(
                    "/v1/completions", json={**body, "prompt": f"{number:03}" * 40}, headers=headers
                )
                statuses.append(reply.status_code)
        return statuses, lost  # streams that close have sent what waited

    first = run(1)
    assert first[0].count(503) > 3 and all(len(seqs) > 3 for seqs in first[1])
    assert run(1, late=0.02) == first
    assert run(2)[0] != first[0]


def test_lost_events_depend_on_stream_and_number_alone() -> None:
    faults = MockFaults(event_loss=0.5)
    forward = [is_lost(faults, "worker0@0", seq) for seq in range(200)]
    assert forward == [is_lost(faults, "worker0@0", seq) for seq in reversed(range(200))][::-1]
    assert 70 < sum(forward) < 130 and forward != [is_lost(faults, "worker0@1", seq) for seq in range(200)]


def test_the_queue_is_bounded() -> None:
    with Served(max_waiting=3) as served, contextlib.ExitStack() as stack:
        driver = served.fleet.workers[0].driver
        served.inside(driver.freeze)
        body = {"prompt": "x", "max_tokens": 5, "stream": True}
        open_ = [stack.enter_context(served.client.stream("POST", "/v1/completions", json=body)) for _ in range(3)]
        full = served.client.post("/v1/completions", json=body)
        assert full.status_code == 503 and full.headers["retry-after"] == "1"
        assert full.json()["error"]["type"] == "ServiceUnavailableError"
        served.inside(driver.thaw)
        assert all(reply.read().endswith(b"[DONE]\n\n") for reply in open_)
        served.check()


def test_bodies_headers_and_choices_are_bounded() -> None:
    with Served(limits=Bounds(body_bytes=1000), max_choices=4) as served:
        assert served.complete("x" * 1000, 413)["error"]["code"] == 413
        assert "5 choices" in served.complete("x", 400, n=5)["error"]["message"]
        assert "6 choices" in served.complete(["x", "y", "z"], 400, n=2)["error"]["message"]
        assert served.client.get("/health", headers={"X-Long": "x" * 70_000}).json()["error"]["code"] == 431


def test_a_body_that_never_comes() -> None:
    with Served(limits=Bounds(body_seconds=0.2)) as served:
        address = ("127.0.0.1", int(served.url.rpartition(":")[2]))
        with socket.create_connection(address, timeout=30) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            assert b" 408 " in slow.recv(200).split(b"\r\n")[0]


def test_a_token_guards_it() -> None:
    with Served(token="secret") as served:
        served.complete("x")
        with httpx.Client(base_url=served.url, trust_env=False) as stranger:
            assert stranger.get("/health").status_code == stranger.get("/metrics").status_code == 200
            for path in ("/v1/models", "/admin/workers", "/admin/faults"):
                reply = stranger.get(path)
                assert reply.status_code == 401 and reply.json()["error"]["type"] == "AuthenticationError"
            assert stranger.post("/v1/completions", json={"prompt": "x"}).status_code == 401


def test_unknown_paths_and_methods(served: Served) -> None:
    nowhere = served.client.get("/nowhere")
    assert nowhere.status_code == 404 and nowhere.json() == {"detail": "Not Found"}
    wrong = served.client.get("/v1/completions")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"
    headers = {"Content-Type": "application/json"}
    for content in (b"", b"{", b"[]", b"\xff", b"[" * 5000, b'{"prompt": "\\ud800"}'):
        said = served.client.post("/v1/completions", content=content, headers=headers).json()["error"]
        assert said["code"] == 400 and said["type"] == "Bad Request" and said["param"].startswith("body")


def test_an_engine_that_fails_dies_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    """A bug in the engine: as with a real one its worker is gone, with all it had cached, and then there again."""
    with Served(events_endpoint=LOOPBACK, replay_endpoint=LOOPBACK) as fleet:
        (worker,) = fleet.fleet.workers
        fleet.complete("x" * 100)
        assert fleet.cached("x" * 100)

        def fail(now: int) -> None:
            raise RuntimeError("a bug of the engine")

        worker.engine.begin = fail  # type: ignore[method-assign]
        with pytest.raises(httpx.TransportError):
            fleet.complete("y")
        eventually(lambda: worker.alive and worker.deaths == 1)
        eventually(lambda: answers(fleet))
        assert not fleet.cached("x" * 100)
        assert caplog.text.count("worker0 failed and is begun again: RuntimeError: a bug of the engine") == 1
        assert fleet.fleet.supervisor.failures == 1


def answers(fleet: Served) -> bool:
    try:
        return fleet.client.get("/health").status_code == 200
    except httpx.TransportError:
        return False
