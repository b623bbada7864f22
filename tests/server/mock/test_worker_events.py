"""KV events reach a subscriber, and an index that names blocks differently credits what the engine would hit."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")

import zmq
from tests.events.transport.blocking import BlockingSubscriber
from tests.server.mock.support import LOOPBACK, PATIENCE, Process, Served

from kvyard.clock import MS
from kvyard.events.transport import Limits, State
from kvyard.events.types import Stored
from kvyard.index import Identity, Indexer, Source

pytestmark = pytest.mark.zmq

PROMPT = list(range(100))
EVENTS: dict[str, Any] = {"events_endpoint": LOOPBACK, "replay_endpoint": LOOPBACK}
QUICK = Limits(reply=500 * MS, cooldown=300 * MS, probe=100 * MS, probe_most=400 * MS)


class Listener:
    """An index fed by every rank of a fleet."""

    def __init__(self, served: Served) -> None:
        self.indexer = Indexer(Identity(16))
        self.subscribers: list[BlockingSubscriber] = []
        self.hashes: dict[str, set[int]] = {}
        self.origins: set[str] = set()
        for worker in served.get("/admin/workers"):
            for stream in worker["streams"]:
                name = f"{worker['name']}/{stream['rank']}"
                self.indexer.register(
                    Source(stream=name, worker=worker["name"], rank=stream["rank"], clear_scope="all")
                )
                subscriber = BlockingSubscriber(
                    stream["endpoint"], replay=stream["replay_endpoint"], stream=name, limits=QUICK
                )
                self.subscribers.append(subscriber.open())

    def read(self) -> None:
        for subscriber in self.subscribers:
            while (update := subscriber.receive(timeout=0.01)) is not None:
                self.origins.add(str(update.origin))
                for event in update.events:
                    if isinstance(event, Stored):
                        self.hashes.setdefault(update.stream, set()).update(map(int, event.hashes))
                self.indexer.apply(update)

    def credits(self, prompt: list[int]) -> dict[tuple[str, int], int]:
        """Tokens by worker and rank, where there are any."""
        self.read()
        found = self.indexer.score(prompt).workers.values()
        return {(match.worker.name, match.worker.rank): match.tokens for match in found if match.score > 0}

    def until(self, prompt: list[int], wanted: dict[tuple[str, int], int]) -> None:
        eventually(lambda: self.credits(prompt) == wanted, lambda: (self.credits(prompt), self.indexer.score(prompt)))


@contextlib.contextmanager
def listening(served: Served) -> Iterator[Listener]:
    listener = Listener(served)
    try:
        yield listener
    finally:
        for subscriber in listener.subscribers:
            subscriber.close()


def ask(url: str, prompt: list[int], **headers: str) -> None:
    reply = httpx.post(
        f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": 2}, headers=headers, timeout=30, trust_env=False
    )
    assert reply.status_code == 200, reply.text


def test_an_index_credits_what_each_worker_has() -> None:
    with Served(workers=2, **EVENTS) as served, listening(served) as index:
        ask(served.urls[0], PROMPT)
        index.until(PROMPT, {("worker0", 0): 96})
        ask(served.urls[1], PROMPT[:50])
        index.until(PROMPT, {("worker0", 0): 96, ("worker1", 0): 48})
        one, two = index.hashes.values()
        assert not one & two, "two workers must not have the same engine hashes"
        served.client.post("/reset_prefix_cache")
        index.until(PROMPT, {("worker1", 0): 48})
        served.check()


def test_one_seed_for_all() -> None:
    with Served(workers=2, hash_seed="0", **EVENTS) as served, listening(served) as index:
        for url in served.urls:
            ask(url, PROMPT)
        index.until(PROMPT, {("worker0", 0): 96, ("worker1", 0): 96})
        one, two = index.hashes.values()
        assert one == two


def test_ranks() -> None:
    with Served(dp_size=2, **EVENTS) as served, listening(served) as index:
        ask(served.url, PROMPT, **{"X-data-parallel-rank": "1"})
        index.until(PROMPT, {("worker0", 1): 96})
        served.complete(PROMPT, 400, {"X-data-parallel-rank": "2"})
        # Nobody says where: whichever has less to do.
        replies = [served.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}) for _ in range(2)]
        assert {reply.headers["x-mock-rank"] for reply in replies} <= {"0", "1"}
        assert 'vllm:num_requests_running{engine="1",model_name="mock"}' in served.metrics()
        served.check()


def test_a_late_subscriber_receives_everything() -> None:
    with Served(**EVENTS) as served:
        served.complete(PROMPT)
        with listening(served) as index:
            index.until(PROMPT, {("worker0", 0): 96})


def test_lost_events_can_be_had_again() -> None:
    with Served(**EVENTS) as served, listening(served) as index:
        served.complete(PROMPT)
        index.until(PROMPT, {("worker0", 0): 96})
        served.post("/admin/faults", event_loss=1.0)
        other = list(range(2000, 2100))
        served.complete(other)
        eventually(lambda: served.metrics().get('kvyard_mock_events_total{engine="0",fate="withheld"}', 0) > 0)
        index.until(other, {("worker0", 0): 96})  # asked for, since silence makes a good reader ask
        assert any(subscriber.state is State.FRESH for subscriber in index.subscribers)


def test_a_worker_that_dies_comes_back_empty() -> None:
    """At the same addresses, with a new stream, which a reader that was there before notices."""
    with Served(workers=2, **EVENTS) as served, listening(served) as index:
        before = served.get("/admin/workers")[1]["streams"]
        for url in served.urls:
            ask(url, PROMPT)
        index.until(PROMPT, {("worker0", 0): 96, ("worker1", 0): 96})
        served.post("/admin/kill", worker=1)
        eventually(lambda: not served.get("/admin/workers")[1]["alive"])
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{served.urls[1]}/health", trust_env=False)
        assert served.get("/admin/workers")[1]["streams"] == before  # where they will be again
        served.post("/admin/revive", worker=1)
        state = served.get("/admin/workers")[1]
        assert state["alive"] and state["url"] == served.urls[1] and state["streams"] == before
        ask(served.urls[1], PROMPT[:40])
        index.until(PROMPT, {("worker0", 0): 96, ("worker1", 0): 32})
        served.check()


def test_workers_that_connect_to_a_router() -> None:
    """One socket that the router has bound; topics tell the workers apart."""
    router = BlockingSubscriber("tcp://*:0", limits=QUICK).open()
    try:
        port = router.endpoint.rpartition(":")[2]
        with Served(
            workers=2,
            events_endpoint=f"tcp://127.0.0.1:{port}",
            events_connect=True,
            topic="kv@{worker}@mock",
        ) as served:
            heard: set[str] = set()

            def both() -> bool:
                for url in served.urls:
                    ask(url, PROMPT)
                while (update := router.receive(timeout=0.05)) is not None:
                    if any(isinstance(event, Stored) for event in update.events):
                        heard.add(update.topic)
                served.client.post("/reset_prefix_cache")
                httpx.post(f"{served.urls[1]}/reset_prefix_cache", trust_env=False)
                return heard == {"kv@worker0@mock", "kv@worker1@mock"}

            eventually(both, lambda: heard)
    finally:
        router.close()


def test_as_much_is_kept_for_replay_as_vllm_s_setting_says() -> None:
    """By the command's own flag: who comes late is sent the last three batches, and the gap before them shows."""
    settings = {
        "enable_kv_cache_events": True,
        "endpoint": "tcp://*:0",
        "replay_endpoint": "tcp://*:0",
        "buffer_steps": 3,
    }
    with Process("--kv-events-config", json.dumps(settings), "--timing", "fixed:1,1") as process:
        (url,) = process.urls()
        for number in range(8):
            ask(url, [number] * 100)
        (state,) = httpx.get(f"{url}/admin/workers", trust_env=False).json()
        last = eventually(lambda: _last(url))
        dealer = zmq.Context.instance().socket(zmq.DEALER)
        try:
            dealer.setsockopt(zmq.RCVTIMEO, round(PATIENCE * 1000))
            dealer.connect(state["streams"][0]["replay_endpoint"])
            dealer.send_multipart([b"", (0).to_bytes(8, "big")])
            replied: list[int] = []
            while (frames := dealer.recv_multipart())[2] != b"\xff" * 8:
                replied.append(int.from_bytes(frames[2], "big"))
        finally:
            dealer.close(linger=0)
        assert last >= 7 and replied == [last - 2, last - 1, last]


def _last(url: str) -> int:
    """The sequence of the last batch, once nothing is under way any more."""
    view = httpx.get(f"{url}/dashboard/view", trust_env=False).json()
    return 0 if view["totals"]["under_way"] else int(view["streams"][0]["seq"])
