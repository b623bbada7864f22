"""The gateway: its parts put together, started and stopped. It decides nothing itself, and no part holds it.

``members`` knows who is there, ``traffic`` what becomes of requests; both are told and asked on one event loop.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from kvyard.clock import WallClock, pause
from kvyard.errors import KvyardError
from kvyard.server.gateway.client import EngineClient
from kvyard.server.gateway.config import GatewayConfig, NameConfig
from kvyard.server.gateway.discovery import DnsWatch
from kvyard.server.gateway.health import EngineHealth
from kvyard.server.gateway.making import PoolMaker
from kvyard.server.gateway.members import Membership
from kvyard.server.gateway.recording import TrafficRecorder
from kvyard.server.gateway.traffic import GatewayMetrics, Traffic
from kvyard.server.http import Refusal
from kvyard.server.running import AsyncService

log = logging.getLogger(__name__)


class Gateway(AsyncService):
    """Use it in an ``async with`` block, or ``start`` and ``stop`` it."""

    def __init__(
        self, config: GatewayConfig, *, upstream_token: str | None = None, index_token: str | None = None
    ) -> None:
        """Nothing is opened yet. Raises ``KvyardError``."""
        self.config = config
        self.clock = WallClock.since_epoch()
        self.started = self.clock.now()
        self.draining = False
        self.on_drain: list[Callable[[], None]] = []
        """Called when it begins to drain."""
        self.client = EngineClient(config, upstream_token)
        self.health = EngineHealth(config, self.clock)
        self.metrics = GatewayMetrics()
        self.traffic = Traffic(self.clock, self.metrics)
        self._maker = PoolMaker(config, self.client, self.clock, index_token)
        self.index = self._maker.index
        self.members = Membership(config, self.client, self.health, self._maker, self._begin)
        self.members.on_removed.append(self.metrics.forget)
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Take in the engines of the configuration. Raises ``KvyardError`` for what can't be done."""
        config = self.config
        if config.record is not None:
            self.traffic.recorder = TrafficRecorder(
                config.record,
                block_size=config.record_block_size,
                clock=self.clock,
                limit=config.record_limit,
                keep=config.record_keep,
            )
        self.client.open()
        await self._maker.check()
        watches = [(name, DnsWatch(name.host, name.port, interval_s=name.interval_s)) for name in config.names]
        await self.index.start()
        for engine in config.engines:
            await self.members.add(engine)
        for url in config.fleets:
            for engine in await self.client.mock_fleet(url):
                await self.members.add(engine)
        for told in config.subscriptions:
            self.index.keep(told.model_name, told.tenant)
            await self.index.register(told)
        for name, watch in watches:
            self._begin(self._follow(name, watch))
        self._begin(self._flush())

    def drain(self) -> None:
        """Say at /health that we are ending; what is under way goes on. Any thread may call it."""
        self.draining = True
        for callback in self.on_drain:
            callback()

    async def stop(self) -> None:
        """Let go of everything."""
        await self.members.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.index.stop()
        await self.client.close()
        self._maker.close()
        if self.traffic.recorder is not None:
            self.traffic.recorder.close()

    # -- beside requests ----------------------------------------------------------------------------------------------

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something beside, until it ends or the gateway does."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s has ended: %s", task.get_name(), error, exc_info=error)

    async def _flush(self) -> None:
        """Write out what would be lost with this process, each second."""
        while True:
            await pause(1.0)
            self._maker.flush()
            if self.traffic.recorder is not None:
                self.traffic.recorder.flush()

    async def _follow(self, name: NameConfig, watch: DnsWatch) -> None:
        """Take in and let go engines as a name's addresses come and go."""
        async for change in watch.watch():
            for address in change.removed:
                with contextlib.suppress(Refusal):  # it was removed by hand
                    await self.members.remove(address.netloc)
            for address in change.added:
                try:
                    await self.members.add(name.engine(address.netloc))
                except (KvyardError, Refusal) as error:
                    log.warning("%s of %s can't be taken in: %s", address.netloc, name.host, error)
