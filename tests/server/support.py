"""Shared parts of the service's tests: a real server on a port of its own, and real engines that publish to it."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.index.fleet import Engine
from tests.server.threaded import PATIENCE, ThreadedServer
from tests.waiting import retried

from kvyard.blocks import GroupSpec
from kvyard.errors import KvyardError
from kvyard.events.faults import Faults
from kvyard.events.transport import Publisher
from kvyard.events.transport.relay import FaultProxy
from kvyard.server.indexer.config import Config, convert
from kvyard.server.indexer.routes import build
from kvyard.server.indexer.service import Service
from kvyard.server.running import Running, listen

LOOPBACK = "tcp://127.0.0.1:0"
"""Seconds that anything may take; the machine may be busy."""
QUICK = {"reply_ms": 500, "cooldown_ms": 300, "probe_ms": 100, "probe_most_ms": 400}
"""Recovery without the pauses that are good manners in production."""


@contextlib.contextmanager
def asking(url: str, path: str, headers: str = "", **body: Any) -> Iterator[socket.socket]:
    """A client that has posted ``body`` and reads nothing by itself; it hangs up at the end."""
    host, port = url.removeprefix("http://").split(":")
    text = json.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n{headers}"
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as line:
        line.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode())
        yield line


class Served(ThreadedServer):
    """A service over HTTP, in a thread."""

    def __init__(self, token: str | None = None, **settings: Any) -> None:
        settings.setdefault("streams", QUICK)
        config: Config = convert(settings, "the test")
        app, self.service = build(config, token)
        assert isinstance(self.service, Service)
        self._bound = listen("127.0.0.1", 0)
        self._running = Running(app, self._bound, around=self.service, ready=lambda _: self._ready.set())
        super().__init__(self._running.url, token)

    def run(self, ready: Callable[[], None]) -> None:
        with self._bound:
            self._running.run()

    def stop(self) -> None:
        self._running.stop()

    def post(self, path: str, status: int = 200, **body: Any) -> Any:
        reply = self.client.post(path, json=body)
        assert reply.status_code == status, (reply.status_code, reply.text)
        return reply.json()

    def register(self, **fields: Any) -> list[str]:
        return self.post("/register", 201, **{"model_name": "m", **fields})["streams"]

    def score(self, tokens: Sequence[int], **fields: Any) -> dict[tuple[str, int], dict[str, Any]]:
        """Per (instance, rank) its answer."""
        found = self.post("/score", token_ids=list(tokens), **{"model_name": "m", **fields})
        return {(str(one["instance_id"]), one["dp_rank"]): one for one in found["results"][0]["workers"]}


class LiveRank:
    """One rank of a worker: a real block manager whose events a real publisher sends, through faults if wanted."""

    def __init__(
        self,
        worker: str,
        rank: int,
        groups: Sequence[GroupSpec],
        *,
        faults: Faults | None = None,
        replay: bool = True,
        blocks: int = 40,
        seed: int = 0,
        hwm: int = 100_000,
    ) -> None:
        self._hwm = hwm
        self.worker, self.rank, self.groups = worker, rank, groups
        self._stack = contextlib.ExitStack()
        self._blocks, self._seed, self._generation = blocks, seed, 0
        self._replay = replay
        self.publisher = self._begin(LOOPBACK, LOOPBACK if replay else None)
        self._stack.callback(self._close)
        self.endpoint, self.replay = self.publisher.endpoint, self.publisher.replay_endpoint
        if faults is not None:
            proxy = self._stack.enter_context(FaultProxy(self.endpoint, LOOPBACK, faults, replay=LOOPBACK))
            self.endpoint, self.replay = proxy.endpoint, proxy.replay_endpoint

    def _close(self) -> None:
        self.publisher.close()

    def _begin(self, endpoint: str, replay: str | None) -> Publisher:
        self.engine = Engine(
            f"{self.worker}@{self.rank}", self.groups, blocks=self._blocks, seed=self._seed + 1000 * self._generation
        )

        def start() -> Publisher:
            return Publisher(endpoint, self.engine.batcher.resync, replay=replay, hwm=self._hwm).start()

        return retried(start, KvyardError)  # ZeroMQ gives an address back some time after its socket was closed

    def __enter__(self) -> LiveRank:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def registration(self, **fields: Any) -> dict[str, Any]:
        given = {
            "instance_id": self.worker,
            "dp_rank": self.rank,
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay,
            "model_name": "m",
            "clear_scope": "all",
            "groups": [{name: value for name, value in _fields(spec) if value is not None} for spec in self.groups],
        }
        return {name: value for name, value in {**given, **fields}.items() if value is not None}

    def step(self, prompts: Sequence[Sequence[int]]) -> None:
        batch = self.engine.step(prompts)
        if batch is not None:
            self.publisher.publish(batch, 0)

    def run(self, tokens: Sequence[int]) -> None:
        """Serve one whole request and announce what that changed."""
        manager = self.engine.manager
        manager.begin_step()
        request = self.engine.request(tokens)
        hit = manager.lookup(request)
        assert manager.allocate(request, request.num_tokens - hit.tokens, hit) is not None
        request.num_computed_tokens = request.num_tokens
        manager.free(request)
        self.say()

    def say(self) -> None:
        """Publish what happened since the last time."""
        batch = self.engine.batcher.end_iteration(0)
        if batch is not None:
            self.publisher.publish(batch, 0)

    def restart(self) -> None:
        """The engine dies and another one starts at the same address, with nothing cached and sequence 0."""
        # With a wildcard, since a publisher connects to any other address, as vLLM's does.
        endpoint, replay = (
            None if one is None else f"tcp://*:{one.rpartition(':')[2]}"
            for one in (self.publisher.endpoint, self.publisher.replay_endpoint)
        )
        assert endpoint is not None
        self.publisher.close()
        self._generation += 1
        self.publisher = self._begin(endpoint, replay)


def _fields(spec: GroupSpec) -> Iterator[tuple[str, Any]]:
    yield "kind", spec.kind
    yield "block_size", spec.block_size
    yield "window", spec.window
    yield "chunk", spec.chunk
    if spec.is_state:
        yield "mode", spec.mode
    yield "eagle", spec.eagle
