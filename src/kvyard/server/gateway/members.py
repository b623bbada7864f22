"""Members: which engines there are, which pool each belongs to, and which names requests may use."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial

import msgspec

from kvyard.clock import pause
from kvyard.errors import KvyardError
from kvyard.openai import ListedModel
from kvyard.server.gateway.client import EngineClient
from kvyard.server.gateway.config import GatewayConfig, GatewayEngine
from kvyard.server.gateway.connections import EngineAddress
from kvyard.server.gateway.engine import Engine
from kvyard.server.gateway.health import EngineHealth
from kvyard.server.gateway.making import LOCAL, PoolMaker
from kvyard.server.gateway.pool import EnginePool
from kvyard.server.http import Refusal
from kvyard.server.indexer.listener import Listener
from kvyard.server.indexer.schemas import Unregister
from kvyard.server.supervisor import Supervised, Supervisor

log = logging.getLogger(__name__)

FIRST_LOOKS = 3.0
MOST_POOLS = 1000
"""Models of a gateway, those that no engine serves any more included."""


class Membership(msgspec.Struct, eq=False):
    """The engines and pools of one gateway."""

    config: GatewayConfig
    client: EngineClient
    health: EngineHealth
    maker: PoolMaker
    supervisor: Supervisor
    engines: dict[str, Engine] = {}
    pools: dict[str, EnginePool] = {}
    names: dict[str, tuple[EnginePool, str | None]] = {}
    """Names that requests may use: their pool, and the adapter they mean."""
    on_removed: list[Callable[[str], None]] = []
    """Called with the name of a removed engine."""
    on_looked: list[Callable[[Engine], None]] = []
    """Called with an engine that was asked for its names because they have changed."""
    _watches: dict[str, Supervised] = {}
    _changing: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)
    _making: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)
    """Two engines may be found to belong to the same new model at one time."""

    async def stop(self) -> None:
        """Look after engines no more."""
        for name in list(self._watches):
            await self._unwatch(name)

    async def _unwatch(self, name: str) -> None:
        await self._watches.pop(name).stop()

    # -- engines ----------------------------------------------------------------------------------------------------------

    async def add(self, config: GatewayEngine) -> Engine:
        """Take an engine in; it gets requests once it is well. Raises ``KvyardError``; ``Refusal`` where its name is taken."""
        async with self._changing:
            engine = Engine(config)
            if engine.name in self.engines:
                raise Refusal(
                    409,
                    f"there is an engine {engine.name} already",
                    field="name",
                    fix="remove it first, or give a name",
                )
            self.engines[engine.name] = engine
            if config.model is not None:
                try:
                    await self._join(engine, config.model)
                except BaseException:
                    del self.engines[engine.name]
                    raise
            watch = partial(self.health.watch, engine, self.client, self._learn)
            self._watches[engine.name] = self.supervisor.keep(f"watch of {engine.name}", watch)
            return engine

    async def remove(self, name: str) -> Engine:
        """Remove an engine, its events and all they announced. Its requests in flight go on. Raises ``Refusal``."""
        async with self._changing:
            engine = self.engine(name)
            await self._unwatch(name)
            engine.settle()
            del self.engines[name]
            await self._leave(engine)
            for removed in self.on_removed:
                removed(name)
            return engine

    def engine(self, name: str) -> Engine:
        """Return the engine of that name. Raises ``Refusal``."""
        engine = self.engines.get(name)
        if engine is None:
            raise Refusal(404, f"there is no engine {name[:200]!r}", field="engine", fix="see /admin/engines")
        return engine

    async def looked_at(self, discovered: bool) -> None:
        """Wait until it is known of every engine whether it answers, for ``FIRST_LOOKS`` seconds at most. ``discovered``:
        engines are looked for, and there may be none yet.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOKS):
                while (discovered and not self.engines) or any(
                    engine.state == "starting" for engine in self.engines.values()
                ):
                    await pause(0.01)

    def drain(self, name: str) -> Engine:
        """Send an engine nothing more; its requests in flight go on. Raises ``Refusal``."""
        engine = self.engine(name)
        engine.draining = True
        if engine.pool is not None:
            engine.pool.shut(engine)
        return engine

    def resume(self, name: str) -> Engine:
        """Send a drained engine requests again. Raises ``Refusal``."""
        engine = self.engine(name)
        engine.draining = False
        if engine.pool is not None and engine.up:
            engine.pool.open(engine)
        return engine

    def lost(self, address: EngineAddress) -> None:
        """Note that the engine at ``address`` has closed its connections."""
        for engine in self.engines.values():
            if engine.address == address and engine.up:
                self.health.doubt(engine)

    def listeners(self, engine: Engine) -> list[Listener]:
        """Return the listeners to an engine's events here."""
        model = self.maker.index.models.get((engine.model, LOCAL))
        if model is None:
            return []
        return [listener for listener in model.listeners.values() if listener.source.worker == engine.name]

    # -- pools ------------------------------------------------------------------------------------------------------------

    def find(self, model: str | None) -> tuple[str, EnginePool, str | None]:
        """Return a request's model name, pool and adapter. Raises ``Refusal`` with 404, or 503 while no engine is known."""
        if model is None:
            # One whose engines are all gone isn't meant, unless it is the only one there ever was.
            there = [name for name, pool in self.pools.items() if pool.engines] or list(self.pools)
            if len(there) == 1:
                return there[0], self.pools[there[0]], None
            if there:
                raise Refusal(400, "model is missing, and there are several", field="model", fix="see /v1/models")
        if model is None or not self.names:
            raise Refusal(503, "no engine is known yet", fix="try again later", Retry_After="1")
        entry = self.names.get(model)
        if entry is None:
            raise Refusal(404, f"The model `{model[:200]}` does not exist", field="model", fix="see /v1/models")
        return model, *entry

    async def look(self, engine: Engine, *, reported: bool = False) -> None:
        """Ask an engine now which names it answers to; ``reported`` by another process, which looked already. Raises
        ``EngineFailed``.
        """
        await self._learn(engine, (await self.client.models(engine.address)).data)
        if not reported:
            for looked in self.on_looked:
                looked(engine)

    async def _learn(self, engine: Engine, listed: list[ListedModel]) -> None:
        """Learn the names that an engine serves; the first time, also the pool that it belongs to."""
        models = {listed_model.id: listed_model.parent for listed_model in listed}
        engine.listed = {listed_model.id: listed_model for listed_model in listed}
        engine.longest = max(filter(None, (listed_model.max_model_len for listed_model in listed)), default=None)
        if engine.pool is not None and engine.config.model is None and engine.model not in models:
            log.warning("%s doesn't serve %s any more", engine.name, engine.model)
            await self._leave(engine)
        if engine.config.events is None and not engine.asked_for_events:
            await self._ask_for_events(engine)
        if engine.pool is None:
            base = next((listed_model.id for listed_model in listed if listed_model.parent is None), None)
            if base is None:
                engine.reason = "it serves no model"
                return
            await self._join(engine, base, lenient=True)
        if models != engine.models:
            if engine.config.model is not None and engine.config.model not in models:
                log.warning(
                    "%s serves %s, not %s as it was given", engine.name, ", ".join(models)[:200], engine.config.model
                )
            engine.models = models
            self._names_changed()

    async def _ask_for_events(self, engine: Engine) -> None:
        """Learn from an engine where it publishes, once; without an answer it publishes nowhere. Raises ``EngineFailed``."""
        if self.config.index_url is not None or not self.config.ask_for_events:
            return
        sources = await self.client.event_sources(engine.url)
        engine.asked_for_events = True
        if not sources or (engine.config.dp_size > 1 and engine.config.dp_size != len(sources)):
            return
        engine.learned(engine.config.with_events(sources))
        log.info("%s publishes its events at %s", engine.name, engine.config.events)
        if engine.pool is not None:
            await self._listen(engine, engine.model, lenient=True)

    async def _join(self, engine: Engine, model: str, *, lenient: bool = False) -> None:
        """Put an engine into the pool of ``model`` and listen to its events. Where that can't be done, raises ``KvyardError``
        or ``Refusal``; with ``lenient`` it is noted, and nothing is known of the engine's cache.
        """
        async with self._making:
            pool = self.pools.get(model)
            if pool is None:
                if len(self.pools) >= MOST_POOLS:
                    raise KvyardError(
                        f"it would be model number {MOST_POOLS + 1}: restart the gateway to forget old ones"
                    )
                roles = engine.config.role != "both" or self.config.has_roles
                pool = self.maker.make(model, engine.config.block_size, roles)
                if pool.sharing is not None:
                    try:
                        await pool.sharing.start()
                    except KvyardError:
                        if not lenient:
                            await pool.sharing.close()
                            raise
                    self.supervisor.keep(f"sharing of {model}", pool.sharing.run)
                self.pools[model] = pool
            if engine.config.role != "both" and pool.prefill_pool is None:
                pool.add_prefill_pool(self.maker.make_prefill_pool(pool))
        await self._listen(engine, model, lenient=lenient)
        pool.add(engine)
        self._names_changed()

    async def _listen(self, engine: Engine, model: str, *, lenient: bool) -> None:
        """Follow an engine's events; raises as ``_join`` does."""
        if self.config.index_url is None:
            engine.heard_for = model
            try:
                for registration in engine.config.registrations(model):
                    await self.maker.index.register(registration)
            except BaseException as error:
                await self._stop_listening(engine)
                if not lenient or not isinstance(error, KvyardError | Refusal):
                    raise
                engine.streams_error = f"its events can't be followed: {error}"
                log.warning("%s: %s", engine.name, engine.streams_error)

    async def _leave(self, engine: Engine) -> None:
        """Take an engine out of its pool, with its events and all they announced."""
        if engine.pool is not None:
            self.pools[engine.model].remove(engine)
        await self._stop_listening(engine)
        engine.state = "starting"
        self._names_changed()

    async def _stop_listening(self, engine: Engine) -> None:
        if engine.heard_for is not None:
            with contextlib.suppress(Refusal):  # it had no stream
                await self.maker.index.unregister(Unregister(model_name=engine.heard_for, instance_id=engine.name))
            engine.heard_for = None

    def _names_changed(self) -> None:
        names: dict[str, tuple[EnginePool, str | None]] = {}
        for pool in self.pools.values():
            pool.names_changed()
            for engine in pool.engines.values():
                for name, base in engine.models.items():
                    names.setdefault(name, (pool, None if base is None else name))
        for model, pool in self.pools.items():
            if pool.engines:
                names[model] = (pool, None)
        self.names = names
