"""Shared parts of the gateway's tests: a real gateway on a port of its own, in a thread, in front of real mock fleets."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from tests.server.mock.support import LOOPBACK, Served
from tests.server.read_process import ReadProcess
from tests.server.support import QUICK
from tests.server.threaded import PATIENCE, ThreadedServer
from tests.waiting import eventually

from kvyard.server.gateway.config import convert
from kvyard.server.gateway.processes.channel import Channel
from kvyard.server.gateway.routes import build
from kvyard.server.running import Running, listen

__all__ = ["LOOPBACK", "PATIENCE", "Gated", "GatewayProcess", "Served", "eventually", "fleet", "front"]

SWIFT = {
    "health_seconds": 0.2,
    "recovery_seconds": 0.05,
    "shun_seconds": 0.3,
    "health_timeout": 20.0,
    "connect_seconds": 20.0,
    "index_seconds": 20.0,
    "tokenize_seconds": 20.0,
    "tokenizer": "bytes",
    "streams": QUICK,
}
"""Settings for tests: looks that follow each other closely, patient ones, since the machine may be busy."""


DRAIN_SECONDS = 5.0
KEEP_ALIVE_SECONDS = 5.0


class Gated(ThreadedServer):
    """A gateway over HTTP, in a thread."""

    def __init__(
        self,
        *,
        token: str | None = None,
        upstream_token: str | None = None,
        admin_token: str | None = None,
        channel: Channel | None = None,
        **settings: Any,
    ) -> None:
        config = convert({**SWIFT, **settings}, "the test")
        app, self.gateway = build(
            config, token=token, upstream_token=upstream_token, admin_token=admin_token, channel=channel
        )
        self._bound = listen("127.0.0.1", 0)
        self.running = Running(
            app,
            self._bound,
            around=self.gateway,
            ready=lambda _: self._ready.set(),
            ending=self.gateway.drain,
            drain_seconds=DRAIN_SECONDS,
            keep_alive_seconds=KEEP_ALIVE_SECONDS,
        )
        super().__init__(self.running.url, token)

    def run(self, ready: Callable[[], None]) -> None:
        with self._bound:
            self.running.run()

    def stop(self) -> None:
        self.running.stop()

    def ready(self, count: int, streams: int | None = None) -> Gated:
        """Wait until so many engines get requests, and so many event streams are whole."""

        def well() -> bool:
            health = self.client.get("/health").json()
            whole = streams is None or health["streams"].get("fresh", 0) >= streams
            return health["engines"].get("ready", 0) >= count and whole

        eventually(well, lambda: (self.client.get("/health").text, self.client.get("/admin/engines").text))
        return self

    def post(self, path: str, status: int = 200, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        reply = self.client.post(path, json=body, headers=headers)
        assert reply.status_code == status, (reply.status_code, reply.text)
        return reply

    def complete(
        self, prompt: Any, status: int = 200, headers: dict[str, str] | None = None, **body: Any
    ) -> httpx.Response:
        return self.post("/v1/completions", status, headers, **{"prompt": prompt, "max_tokens": 4, **body})

    def stream(self, prompt: Any, headers: dict[str, str] | None = None, **body: Any) -> Any:
        body = {"prompt": prompt, "max_tokens": 4, "stream": True, **body}
        return self.client.stream("POST", "/v1/completions", json=body, headers=headers)

    def engines(self) -> dict[str, dict[str, Any]]:
        return {one["name"]: one for one in self.client.get("/admin/engines").json()}

    def idle(self) -> None:
        """Wait until nothing is under way, and see that nothing is held."""

        def pools() -> list[Any]:
            found = self.gateway.members.pools.values()
            return [*found, *(pool.prefill_pool for pool in found if pool.prefill_pool is not None)]

        def quiet() -> bool:
            for pool in pools():
                pool.router.check_integrity()
            return self.gateway.traffic.counters.under_way == 0 and all(
                engine.in_flight == 0 for engine in self.gateway.members.engines.values()
            )

        eventually(quiet, lambda: self.gateway.traffic.counters)
        assert all(not pool.router.loads.active and not pool.waiting for pool in pools())


def fleet(**settings: Any) -> Served:
    """Mock workers that publish their events on this machine."""
    return Served(**{"events_endpoint": LOOPBACK, "replay_endpoint": LOOPBACK, **settings})


@contextlib.contextmanager
def front(workers: int = 2, *, mock: dict[str, Any] | None = None, **settings: Any) -> Iterator[tuple[Gated, Served]]:
    """A gateway in front of a fleet, both ready."""
    with fleet(workers=workers, **(mock or {})) as served, Gated(fleets=[served.url], **settings) as gated:
        ranks = served.fleet.config.dp_size * workers
        yield gated.ready(workers, ranks), served


def worker_of(reply: httpx.Response) -> str:
    """The mock worker that answered."""
    found = reply.headers["x-mock-worker"]
    assert f"worker={found}@" in reply.headers["x-kvyard-decision"]
    return found


def cached(reply: httpx.Response) -> int:
    """Tokens of the prompt that the engine had."""
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


class GatewayProcess(ReadProcess):
    """A gateway in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVYARD_")}
        super().__init__(
            subprocess.Popen(
                [sys.executable, "-m", "kvyard", "gateway", "--port", "0", *arguments],
                stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
        )

    @property
    def url(self) -> str:
        def found() -> str:
            assert self.process.poll() is None, self.text
            urls = re.findall(r"serving at (https?://[^,\s]+)", self.text)
            return urls[0] if urls else ""

        return str(eventually(found, lambda: self.text))


def together(deeds: list[Callable[[], Any]]) -> list[Any]:
    """Return what all of ``deeds`` return, or raise, done at once."""
    found: list[Any] = [None] * len(deeds)

    def run(at: int) -> None:
        try:
            found[at] = deeds[at]()
        except Exception as error:
            found[at] = error

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(deeds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    return found
