"""The gateway: its parts put together, started and stopped. It decides nothing itself, and no part holds it.

``members`` knows the engines, ``traffic`` the fate of requests; both are used on one event loop.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from urllib.parse import urlsplit

import msgspec

from kvyard.clock import WallClock, pause
from kvyard.errors import KvyardError
from kvyard.index.metrics import Sample
from kvyard.server.dashboard.view import ExpectationView
from kvyard.server.gateway.access import KeyFile, KeyRing, read_keys
from kvyard.server.gateway.access_log import AccessLog
from kvyard.server.gateway.client import EngineClient
from kvyard.server.gateway.conditions import SAID_AT_ONCE, conditions
from kvyard.server.gateway.config import GatewayConfig, NameConfig, ServiceConfig
from kvyard.server.gateway.discovery import Address, DnsWatch
from kvyard.server.gateway.endpoint_slices import SliceWatch
from kvyard.server.gateway.health import EngineHealth
from kvyard.server.gateway.making import PoolMaker
from kvyard.server.gateway.members import Membership
from kvyard.server.gateway.processes.channel import Channel
from kvyard.server.gateway.processes.frames import HUB, FrameKind
from kvyard.server.gateway.processes.process_bookings import ProcessBookings
from kvyard.server.gateway.processes.records import ToldLog, ToldRecorder
from kvyard.server.gateway.recording import TrafficRecorder
from kvyard.server.gateway.reloading import Reloading
from kvyard.server.gateway.tracing import Tracing
from kvyard.server.gateway.traffic import GatewayMetrics, GatewayTraffic, P
from kvyard.server.health import HealthReason, say_health
from kvyard.server.held import HeldBytes
from kvyard.server.http import Refusal
from kvyard.server.running import AsyncService
from kvyard.server.supervisor import Supervisor, Work

log = logging.getLogger(__name__)

FLEET_SECONDS = 0.5
"""Between two questions to a mock that doesn't answer yet."""


class Gateway(AsyncService):
    """Use it in an ``async with`` block, or ``start`` and ``stop`` it."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        upstream_token: str | None = None,
        index_token: str | None = None,
        channel: Channel | None = None,
        keys: KeyFile | None = None,
    ) -> None:
        """Nothing is opened yet. With a ``channel`` it is one process of several. ``keys`` are those of the file, where it was
        read before. Raises ``KvyardError``.
        """
        self.config = config
        self.clock = WallClock.since_epoch()
        self.started = self.clock.now()
        self.draining = False
        self.expectation: ExpectationView | None = None
        """Hits owed and counted lately, as ``kvyard expect --watch`` reported."""
        self.on_drain: list[Callable[[], None]] = []
        """Called when it begins to drain."""
        self.beside: dict[str, Work] = {}
        """Tasks that run from its start to its end, beside requests, by name."""
        self.wrong_beside: list[Callable[[], Iterator[HealthReason]]] = []
        """Further health reasons, if it is part of something larger."""
        self.joining: list[Callable[[], Awaitable[None]]] = []
        """Done at its start, once the engines of the configuration are taken in."""
        self._follows = False
        self._channel = channel
        bookings = None if channel is None else ProcessBookings(channel, self.clock)
        if bookings is not None:
            self.beside["bookings"] = bookings.run
        self.client = EngineClient(config, upstream_token)
        self.health = EngineHealth(config, self.clock)
        self.metrics = GatewayMetrics()
        self.traffic = GatewayTraffic(self.clock, self.metrics)
        self.held = HeldBytes(config.held_bytes)
        self.held.on_refused = self.traffic.crowded_out
        if keys is None and config.keys_file is not None:
            keys = read_keys(config.keys_file)
        self.keys = None if keys is None else KeyRing(keys, self.clock.now)
        self.tracing = None if config.traces is None else Tracing.to(config.traces)
        self.supervisor = Supervisor()
        self._maker = PoolMaker(config, self.client, self.clock, index_token, self.supervisor, bookings)
        self.index = self._maker.index
        self.members = Membership(config, self.client, self.health, self._maker, self.supervisor)
        self.members.on_removed.append(self.metrics.forget)
        self.client.on_lost = self.members.lost
        self.reloading = Reloading(config, self.members, self.keys)
        self.reloading.changed.append(self._configured)

    def follow(self) -> None:
        """Begin with the current configuration, and wait for engines that are being discovered: for a process that replaces one
        that ended, before its start.
        """
        self._follows = True

    async def start(self) -> None:
        """Add the engines of the configuration. Raises ``KvyardError`` if one can't be added."""
        config, channel = self.config, self._channel
        if channel is not None:
            await channel.open()
            self._have_written(config, channel)
        elif config.record is not None:
            self.traffic.recorder = TrafficRecorder(
                config.record,
                block_size=config.record_block_size,
                clock=self.clock,
                limit=config.record_limit,
                keep=config.record_keep,
            )
        if config.access_log is not None and channel is None:
            self.traffic.access_log = self.reloading.access_log = AccessLog(config.access_log)
        self.client.open()
        await self._maker.check()
        watches = [(name, DnsWatch(name.host, name.port, interval_s=name.interval_s)) for name in config.names]
        services = [(service, SliceWatch(self.client.session, service)) for service in config.services]
        await self.index.start()
        for engine in config.engines:
            await self.members.add(engine)
        for url in config.fleets:
            if not await self._take_fleet(url):
                log.warning("%s doesn't answer yet: its workers are added once it does", url)
                self.supervisor.keep(f"workers of {url}", partial(self._await_fleet, url))
        if self._follows:
            await self.reloading.reload()
            self.reloading.reloads = 0
        for join in self.joining:
            await join()
        for registration in config.subscriptions:
            self.index.keep(registration.model_name, registration.tenant)
            await self.index.register(registration)
        for name, watch in watches:
            self.supervisor.keep(f"lookups of {name.host}", partial(self._follow, name, watch))
        for service, slices in services:
            self.supervisor.keep(f"endpoints of {service.service}", partial(self._follow, service, slices))
        self.supervisor.keep("files", self._flush)
        if self.reloading.files:
            self.supervisor.keep("configuration", self.reloading.watch)
        for task, work in self.beside.items():
            self.supervisor.keep(task, work)
        self.supervisor.keep("health", partial(say_health, self._unsaid))
        if self._follows or channel is not None:
            # Others may answer already: it shouldn't take requests which it must refuse.
            await self.members.looked_at(self._follows and bool(watches or services))

    def _have_written(self, config: GatewayConfig, channel: Channel) -> None:
        """Have the parent write the log lines of this process."""
        if config.record is not None:
            tell = partial(channel.send, FrameKind.RECORD, HUB)
            self.traffic.recorder = ToldRecorder(config.record, self.clock, tell)
        if config.access_log is not None:
            self.traffic.access_log = ToldLog(config.access_log, partial(channel.send, FrameKind.LINES, HUB))

    def drain(self) -> None:
        """Report at /health that the gateway is ending; requests in flight go on. Any thread may call it."""
        self.draining = True
        for callback in self.on_drain:
            callback()

    async def stop(self) -> None:
        """Release everything."""
        await self.members.stop()
        await self.supervisor.stop()
        await self.index.stop()
        await self.client.close()
        self._maker.close()
        if self.traffic.recorder is not None:
            self.traffic.recorder.close()
        if self.traffic.access_log is not None:
            self.traffic.access_log.close()
        if self._channel is not None:
            self._channel.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    def _configured(self, config: GatewayConfig) -> None:
        self.config = self.members.config = self.health.config = config
        self.client.configured(config)
        for pool in self.members.pools.values():
            pool.configured(config)

    # -- beside requests ----------------------------------------------------------------------------------------------

    def conditions(self) -> Iterator[HealthReason]:
        """Yield all that isn't as it should be."""
        if self.draining:
            yield HealthReason(code="draining", why="it is ending; requests in flight go on", grade="unready")
        if self.reloading.error:
            yield HealthReason(code="config", why=f"it stays as it was: {self.reloading.error}")
        yield from conditions(self.config, self.members, self.index, self.traffic, self._maker.journals)
        for more in self.wrong_beside:
            yield from more()

    def samples(self) -> Iterator[Sample]:
        """Yield the gateway's own metrics."""
        yield P + "task_failures_total", {}, self.supervisor.failures
        yield P + "reloads_total", {}, self.reloading.reloads
        yield P + "degraded", {}, any(True for _ in self.conditions())
        if self.keys is not None:
            for name, count in self.keys.refused.items():
                yield P + "key_refused_total", {"key": name}, count

    def _unsaid(self) -> Iterator[HealthReason]:
        return (reason for reason in self.conditions() if reason.code not in SAID_AT_ONCE)

    async def _flush(self) -> None:
        """Write buffered lines to files, each second."""
        while True:
            await pause(1.0)
            self._maker.flush()
            if self.traffic.recorder is not None:
                self.traffic.recorder.flush()
            if self.traffic.access_log is not None:
                self.traffic.access_log.flush()

    async def _take_fleet(self, url: str) -> bool:
        """Take in the workers of a mock that aren't here; false if it doesn't answer. Raises ``KvyardError`` for no mock."""
        fleet = await self.client.mock_fleet(url)
        for engine in fleet or ():
            known = self.members.engines.get(engine.name or "")
            if known is not None and known.url != engine.url:  # of another mock, which calls its workers the same
                engine = msgspec.structs.replace(engine, name=urlsplit(engine.url).netloc)
            if engine.name not in self.members.engines:
                await self.members.add(engine)
        return fleet is not None

    async def _await_fleet(self, url: str) -> None:
        """Ask a mock for its workers until it answers: it may be started after the gateway."""
        while not await self._take_fleet(url):
            await pause(FLEET_SECONDS)

    async def _follow(self, name: NameConfig | ServiceConfig, watch: DnsWatch | SliceWatch) -> None:
        """Add and remove engines as the addresses of a name or a service come and go."""
        # Where it failed half-way before, those that it had not taken in yet.
        for address in watch.addresses:
            if address.netloc not in self.members.engines:
                await self._take_in(name, address)
        async for change in watch.watch():
            for address in change.removed:
                with contextlib.suppress(Refusal):  # it was removed by hand
                    await self.members.remove(address.netloc)
            for address in change.added:
                await self._take_in(name, address)

    async def _take_in(self, name: NameConfig | ServiceConfig, address: Address) -> None:
        try:
            await self.members.add(name.engine(address.netloc))
        except (KvyardError, Refusal) as error:
            called = name.host if isinstance(name, NameConfig) else name.service
            log.warning("%s of %s can't be applied: %s", address.netloc, called, error)
