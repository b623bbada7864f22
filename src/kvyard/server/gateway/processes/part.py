"""A process's part in the whole: connects messages from and to other processes with its gateway.

A change by an operator goes to the hub first, and is made by every process when it comes from there, so that all make the
same changes in the same order. The process that was asked for it answers when it has made it and the hub knows that: from
then on it holds, whichever process ends. If that process ends before, another process's confirmation counts as well.
"""

import asyncio
import itertools
import logging
import os
from collections.abc import Iterator
from typing import Any

import msgspec

from kvyard.errors import KvyardError
from kvyard.index.metrics import Sample
from kvyard.server.dashboard.view import FleetView, ViewSource
from kvyard.server.gateway.access import KeyFile
from kvyard.server.gateway.config import GatewayConfig, GatewayEngine
from kvyard.server.gateway.engine import Engine
from kvyard.server.gateway.gateway import Gateway
from kvyard.server.gateway.health import Finding
from kvyard.server.gateway.processes.changes import EngineChange
from kvyard.server.gateway.processes.channel import Channel, encode
from kvyard.server.gateway.processes.figures import gathered_figures
from kvyard.server.gateway.processes.frames import ALL, HUB, FrameKind
from kvyard.server.gateway.reloading import live_settings, with_settings
from kvyard.server.gateway.schemas import EngineInfo
from kvyard.server.gateway.traffic import P
from kvyard.server.gateway.view import engine_info
from kvyard.server.health import HealthReason
from kvyard.server.http import Refusal

log = logging.getLogger(__name__)

LOOK = "look"
"""Told of an engine whose names have changed: ask it again."""


class SettingsInForce(msgspec.Struct, kw_only=True):
    """The files as they were when they could be used last, for a process that finds them broken."""

    settings: dict[str, Any]
    keys: KeyFile | None = None


_change = msgspec.msgpack.Decoder(EngineChange).decode
_changes = msgspec.msgpack.Decoder(list[EngineChange]).decode
_in_force = msgspec.msgpack.Decoder(SettingsInForce).decode
_found = msgspec.msgpack.Decoder(tuple[str, str, str]).decode


class PartStatement(msgspec.Struct, kw_only=True):
    """State of a process."""

    draining: bool
    reasons: list[HealthReason]
    engines: list[EngineInfo]
    streams: dict[str, str]
    """The state of each."""
    under_way: int
    queued: int


class PartView(msgspec.Struct, kw_only=True):
    """Content of a process's own dashboard."""

    view: FleetView
    first_bytes: list[int]
    """Times to the first byte of the last minute, in nanoseconds."""


class GatewayPart:
    """Ties a gateway to the channel of its process."""

    def __init__(self, gateway: Gateway, channel: Channel, view: ViewSource) -> None:
        self.channel = channel
        self._gateway = gateway
        self._view = view
        self._numbers = itertools.count(os.getpid() << 20)
        """Of changes; no others than those of one that had this process's number before."""
        self._mine: dict[int, asyncio.Future[Engine]] = {}
        self._waiting: asyncio.Queue[tuple[int, EngineChange]] = asyncio.Queue()
        channel.heard[FrameKind.FOUND] = self._heard
        channel.heard[FrameKind.CHANGE] = lambda peer, body: self._waiting.put_nowait((peer, _change(body)))
        channel.heard[FrameKind.RELOAD] = lambda peer, body: gateway.reloading.ask()
        channel.answers["statement"] = lambda _: encode(self.statement())
        channel.answers["view"] = lambda _: encode(self.view())
        channel.answers["keep"] = lambda _: self.keep()
        gateway.metrics.sources.append(self._samples)
        gateway.health.tell = self._tell
        gateway.members.on_looked.append(lambda engine: self._tell(LOOK, engine.name, ""))
        gateway.reloading.changed.append(self._configured)
        gateway.joining.append(self._catch_up)
        gateway.beside["changes"] = self._make_changes

    # -- how it is ------------------------------------------------------------------------------------------------------

    def statement(self) -> PartStatement:
        """Return the process's present statement."""
        gateway = self._gateway
        return PartStatement(
            draining=gateway.draining,
            reasons=list(gateway.conditions()),
            engines=[engine_info(gateway.members, engine) for engine in gateway.members.engines.values()],
            streams={
                f"{model.name} {name}": listener.info().state
                for model in gateway.index.models.values()
                for name, listener in model.listeners.items()
            },
            under_way=gateway.traffic.counters.under_way,
            queued=sum(len(pool.waiting) for pool in gateway.members.pools.values()),
        )

    def view(self) -> PartView:
        """Return the process's present view."""
        gateway = self._gateway
        return PartView(view=self._view(), first_bytes=gateway.traffic.first_bytes.within(gateway.clock.now()))

    def _samples(self) -> Iterator[Sample]:
        yield (
            P + "process_requests_total",
            {"process": str(self.channel.number)},
            self._gateway.traffic.counters.requests,
        )

    def keep(self) -> bytes:
        """Have the hub keep this process's counters as they are now."""
        self.channel.send(FrameKind.KEEP, HUB, encode(gathered_figures(self._gateway.metrics.registry)))
        return b""

    # -- engines ----------------------------------------------------------------------------------------------------------

    async def change(self, op: str, engine: str, config: GatewayEngine | None = None) -> Engine:
        """Make a change in all processes. Raises what the change raises here."""
        number = next(self._numbers)
        done: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
        self._mine[number] = done
        try:
            message = {"op": op, "engine": engine, "config": config, "number": number}
            if not self.channel.send(FrameKind.CHANGE, HUB, encode(message)):
                raise Refusal(503, "the gateway ends", fix="try again", Retry_After="1")
            return await done
        finally:
            del self._mine[number]

    async def _catch_up(self) -> None:
        """Make the changes that were made before this process was there."""
        reloading = self._gateway.reloading
        if reloading.error and (configured := await self.channel.ask_hub("config")):
            # The others go on with what they read while it could be used.
            in_force = _in_force(configured)
            if in_force.keys is not None:
                reloading.take_over_keys(in_force.keys)
            await reloading.take_over(with_settings(reloading.config, in_force.settings))
        for change in _changes(await self.channel.ask_hub("changes")):
            try:
                if change.op == "add" and change.engine in self._gateway.members.engines:
                    await self._gateway.members.remove(change.engine)  # it was removed, and is another since
                await self._make(change)
            except (KvyardError, Refusal) as error:
                log.info("%s of %s isn't needed here: %s", change.op, change.engine, error)

    async def _make_changes(self) -> None:
        """Make changes as they arrive from the hub, until cancelled."""
        while True:
            peer, change = await self._waiting.get()
            asked = self._mine.get(change.number) if peer == self.channel.number else None
            try:
                engine = await self._make(change)
            except Exception as error:
                if asked is None:
                    log.warning("%s of %s can't be done here: %s", change.op, change.engine, error)
                elif not asked.done():
                    asked.set_exception(error)
                continue
            message = bytes([peer]) + encode(change)
            if asked is None:
                self.channel.send(FrameKind.CHANGED, HUB, message)
                continue
            try:
                await self.channel.ask_hub("changed", message)
            except ConnectionError:
                why = "it was made here, but the parent process doesn't answer"
                if not asked.done():
                    asked.set_exception(Refusal(503, why, fix="see /admin/engines"))
                continue
            if not asked.done():
                asked.set_result(engine)

    async def _make(self, change: EngineChange) -> Engine:
        members = self._gateway.members
        if change.op == "add" and change.config is not None:
            return await members.add(change.config)
        if change.op == "remove":
            return await members.remove(change.engine)
        return members.drain(change.engine) if change.op == "drain" else members.resume(change.engine)

    def _configured(self, config: GatewayConfig) -> None:
        keys = self._gateway.keys
        in_force = SettingsInForce(settings=live_settings(config), keys=None if keys is None else keys.file)
        self.channel.send(FrameKind.CONFIG, HUB, encode(in_force))

    def _tell(self, finding: Finding | str, engine: str, reason: str) -> None:
        self.channel.send(FrameKind.FOUND, ALL, encode((finding, engine, reason)))

    def _heard(self, _: int, body: bytes) -> None:
        finding, name, reason = _found(body)
        engine = self._gateway.members.engines.get(name)
        if engine is None:
            return
        if finding == LOOK:
            self._gateway.supervisor.begin(f"look at {name}", self._gateway.members.look(engine, reported=True))
        else:
            self._gateway.health.heard(msgspec.convert(finding, Finding), engine, reason)
