"""The fleet: mock workers in one process and one event loop, each at a port of its own, as a router expects them.

A worker that is killed is gone as after a ``kill -9``: its port refuses, open connections are reset, its event stream ends.
What a real crash also takes is the process; for that, end the process.
"""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from kvyard.clock import SECOND, WallClock, pause
from kvyard.server.dashboard.routes import Dashboard
from kvyard.server.guard import Guard
from kvyard.server.held import HeldBytes
from kvyard.server.http import picked
from kvyard.server.mock import schemas
from kvyard.server.mock.config import MockConfig
from kvyard.server.mock.driver import Journal
from kvyard.server.mock.handovers import FleetHandovers
from kvyard.server.mock.routes import build
from kvyard.server.mock.tally import RecentWork
from kvyard.server.mock.view import fleet_view
from kvyard.server.mock.worker import MockWorker
from kvyard.server.running import AsyncService, HttpServer, TlsFiles, listen, patiently
from kvyard.server.supervisor import Supervisor
from kvyard.server.tokens import make_tokenizer

WILDCARDS = ("", "0.0.0.0", "::")


class MockFleet(AsyncService):
    """Workers and their ports. ``run`` blocks; ``start`` and ``stop`` are for those who have a loop."""

    def __init__(
        self,
        config: MockConfig,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str | None = None,
        tls: TlsFiles | None = None,
        hosts: Sequence[str] = (),
        journal: Callable[[int], Journal] | None = None,
    ) -> None:
        """Bind the ports: worker i is at ``port + i``, or at any free port if that is 0. ``hosts`` are names by which it
        may be called. ``journal`` gives each worker, by number, its journal of stamps. Raises ``KvyardError``, with nothing
        left open.
        """
        config.check()
        self.config = config
        tokenizer = make_tokenizer(config.tokenizer)
        self._host = host
        self._tls = tls
        guard = Guard(host, tuple(hosts)).check
        self._sockets: list[socket.socket] = []
        self._stopping: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.supervisor = Supervisor()
        # Events carry the date, and that is nominal too.
        wall = WallClock.since_epoch()
        self.clock = WallClock(wall.now(), config.speed)
        recent = RecentWork()
        self.handovers = None
        """Hand-overs of prompts between workers, if they have roles."""
        join = None
        if config.hands_over:
            self.handovers = FleetHandovers(config, self.clock, self.supervisor, token, tls is not None)
            join = self.handovers.join
        self.workers = [
            MockWorker(number, config, self.clock, None if journal is None else journal(number), recent, join)
            for number in range(config.workers)
        ]
        for worker, following in zip(self.workers, [*self.workers[1:], *self.workers[:1]], strict=True):
            worker.neighbour = following
        self.dashboard = Dashboard(partial(fleet_view, self, wall, wall.now() / SECOND), token, guard=guard)
        self.held = HeldBytes()
        """Bytes and connections that clients make all workers hold."""
        self._apps = [build(worker, self, tokenizer, token, guard) for worker in self.workers]
        for app in self._apps:
            app.add(self.dashboard.operations())
        try:
            for number in range(config.workers):
                self._sockets.append(listen(host, port + number if port else 0))
        except BaseException:
            self._close()
            raise
        self.ports = [
            HttpServer(app, bound, drain_seconds=config.drain_seconds, tls=tls)
            for app, bound in zip(self._apps, self._sockets, strict=True)
        ]
        if self.handovers is not None:
            for end, port_at in zip(self.handovers.ends, self.ports, strict=False):
                end.address = (config.kv_transfer_host or ("127.0.0.1" if host in WILDCARDS else host), port_at.port)

    @property
    def urls(self) -> list[str]:
        """Return the workers' addresses."""
        return [port.url for port in self.ports]

    async def start(self) -> None:
        """Serve. Raises ``KvyardError`` where an address can't be had; ``stop`` is due then too."""
        for worker in self.workers:
            await worker.start()
        for port in self.ports:  # later: each reports all workers and all their streams
            await port.start()
        for worker in self.workers:
            self.supervisor.keep(worker.name, partial(self._look_after, worker.number))
        self.supervisor.keep("dashboard", self.dashboard.feed.remember)
        if self.handovers is not None:
            self.supervisor.keep("leases", self.handovers.keep_leases)
        after = self.config.faults.kill_after_s
        if after:
            for worker in self.workers:
                self.do_later(after / self.config.speed, self.kill, worker.number)

    async def stop(self) -> None:
        """Take no more requests, let those in flight finish for a while, then end."""
        await self.supervisor.stop()
        self.dashboard.feed.close()
        await asyncio.gather(*(port.stop() for port in self.ports))
        for worker in self.workers:
            worker.stop()
        if self.handovers is not None:
            await self.handovers.close()
        self._close()

    def run(self, ready: Callable[[list[str]], None] | None = None) -> None:
        """Serve until SIGINT, SIGTERM or ``end``. ``ready`` receives the addresses once requests are answered."""
        asyncio.run(self._run(ready))

    def end(self) -> None:
        """Have ``run`` end; any thread may call it."""
        if self._loop is not None and self._stopping is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self._stopping.set)

    async def _run(self, ready: Callable[[list[str]], None] | None) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self._signalled)
        async with self:
            if ready is not None:
                ready(self.urls)
            await self._stopping.wait()

    def _signalled(self) -> None:
        assert self._stopping is not None
        if self._stopping.is_set():
            for port in self.ports:
                port.hurry()
        self._stopping.set()

    def _close(self) -> None:
        for bound in self._sockets:
            bound.close()

    # -- misbehaviour ---------------------------------------------------------------------------------------------------

    async def kill(self, number: int, seconds: float | None = None) -> None:
        """Let a worker die; after ``seconds`` it comes back, empty."""
        worker = self.workers[number]
        if not worker.alive:
            return
        port = self.ports[number]
        port.die()
        worker.die()
        if self.handovers is not None:
            self.handovers.died(number)
        await port.stop()
        if seconds is not None:
            self.do_later(seconds, self.revive, number)

    async def revive(self, number: int) -> None:
        """Start a dead worker at its old addresses. Does nothing to a living one. Raises ``KvyardError``."""
        worker = self.workers[number]
        if worker.alive or (self._stopping is not None and self._stopping.is_set()):
            return
        bound = await patiently(partial(listen, self._host, self.ports[number].port))
        self._sockets.append(bound)
        await worker.start()
        self.ports[number] = HttpServer(
            self._apps[number], bound, drain_seconds=self.config.drain_seconds, tls=self._tls
        )
        await self.ports[number].start()

    def do_later(self, seconds: float, action: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Run ``action`` after this many real seconds, unless the fleet ends before."""

        async def later() -> None:
            await pause(seconds)
            await action(*args)

        self.supervisor.begin("what was to be done later", later())

    async def _look_after(self, number: int) -> None:
        """Let a worker whose engine fails die, as a real one would, and come back empty when this is begun again."""
        worker = self.workers[number]
        await self.revive(number)
        error = await worker.broken.get()
        await self.kill(number)
        raise error

    def states(self) -> list[schemas.WorkerState]:
        """Return the state of all workers."""
        return [
            schemas.WorkerState(
                **picked(worker, "name role alive block_size faults"),
                url=port.url,
                running=sum(len(core.scheduler.running) for core in worker.cores),
                waiting=max(0, worker.waiting),
                kv_cache_usage=sum(core.scheduler.manager.usage for core in worker.cores) / len(worker.cores),
                streams=worker.streams,
            )
            for worker, port in zip(self.workers, self.ports, strict=True)
        ]
