"""Shared parts of the mock's tests: a real fleet on ports of its own, in a thread."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from tests.server.read_process import ReadProcess
from tests.server.threaded import PATIENCE, ThreadedServer
from tests.waiting import eventually

from kvyard.engine.config import EngineConfig
from kvyard.engine.timing import FixedTiming
from kvyard.server.mock.config import MockConfig
from kvyard.server.mock.fleet import MockFleet

LOOPBACK = "tcp://127.0.0.1:0"
ENGINE: dict[str, Any] = {
    "block_size": 16,
    "num_gpu_blocks": 512,
    "max_model_len": 2048,
    "timing": FixedTiming(prefill_ms=2, decode_ms=1),
}

__all__ = ["ENGINE", "LOOPBACK", "PATIENCE", "Process", "Served", "eventually"]


class Served(ThreadedServer):
    """A fleet over HTTP, in a thread."""

    def __init__(
        self,
        *,
        engine: dict[str, Any] | None = None,
        token: str | None = None,
        journal: Any = None,
        host: str = "127.0.0.1",
        **settings: Any,
    ) -> None:
        settings.setdefault("drain_seconds", 1.0)
        config = MockConfig(engine=EngineConfig(**{**ENGINE, **(engine or {})}), **settings)
        self.fleet = MockFleet(config, host=host, token=token, journal=journal)
        self.urls = self.fleet.urls
        super().__init__(self.urls[0], token)

    def run(self, ready: Callable[[], None]) -> None:
        self.fleet.run(lambda urls: ready())

    def stop(self) -> None:
        self.fleet.end()

    def inside(self, action: Callable[[], Any]) -> Any:
        """Have ``action`` done on the fleet's loop."""

        async def done() -> Any:
            return action()

        loop = self.fleet._loop
        assert loop is not None
        return asyncio.run_coroutine_threadsafe(done(), loop).result(PATIENCE)

    def check(self) -> None:
        """Nothing runs, nothing is held, and the books are right."""

        def idle() -> bool:
            workers = self.fleet.workers
            for worker in workers:
                worker.engine.check_integrity()
            return all(
                core.scheduler.jobs.idle and core.scheduler.manager.usage == 0 for w in workers for core in w.cores
            )

        eventually(lambda: self.inside(idle))

    def post(self, path: str, status: int = 200, headers: dict[str, str] | None = None, **body: Any) -> Any:
        reply = self.client.post(path, json=body, headers=headers)
        assert reply.status_code == status, (reply.status_code, reply.text)
        return reply.json() if reply.headers["content-type"] == "application/json" else reply.text

    def complete(self, prompt: Any, status: int = 200, headers: dict[str, str] | None = None, **body: Any) -> Any:
        return self.post("/v1/completions", status, headers, **{"prompt": prompt, "max_tokens": 4, **body})

    def cached(self, prompt: Any, **body: Any) -> int:
        """Tokens of ``prompt`` that were there."""
        return int(self.complete(prompt, **body)["usage"]["prompt_tokens_details"]["cached_tokens"])


class Process(ReadProcess):
    """A server in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        super().__init__(
            subprocess.Popen(
                [sys.executable, "-m", "kvyard", "mock", "--port", "0", *arguments],
                stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
                env={name: value for name, value in os.environ.items() if name != "KVYARD_TOKEN"},
            )
        )

    def urls(self, count: int = 1) -> list[str]:
        def found() -> list[str]:
            assert self.process.poll() is None, self.text
            urls = re.findall(r"at (http://\S+?),? ?(?:events|$)", self.text, re.MULTILINE)
            return urls if len(urls) == count else []

        return eventually(found, lambda: self.text)
