"""The gateway: who there is, and which model is whose. No HTTP of its own.

Everything is called on one event loop. ``Intake`` takes requests in, exchanges carry them out, ``Watch`` looks after engines,
and ``Traffic`` keeps the books.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvyard.clock import WallClock, pause
from kvyard.errors import KvyardError
from kvyard.server.gateway.config import EngineConfig, GatewayConfig, NameConfig
from kvyard.server.gateway.discovery import DnsWatch
from kvyard.server.gateway.engine import Engine
from kvyard.server.gateway.health import Health
from kvyard.server.gateway.making import LOCAL, PoolMaker
from kvyard.server.gateway.mocks import fleet_of
from kvyard.server.gateway.pool import Pool
from kvyard.server.gateway.traffic import Counters, Traffic
from kvyard.server.gateway.watch import Watch
from kvyard.server.http import Refusal
from kvyard.server.indexer.listener import Listener
from kvyard.server.indexer.schemas import Unregister

if TYPE_CHECKING:
    from kvyard.server.gateway.measures import Measures
    from kvyard.server.gateway.recording import TrafficRecorder

log = logging.getLogger(__name__)


class Gateway:
    """Engines, pools and requests."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        upstream_token: str | None = None,
        index_token: str | None = None,
        measures: Measures | None = None,
    ) -> None:
        """Nothing is opened yet. Raises ``KvyardError``."""
        self.config = config
        self.clock = WallClock.since_epoch()
        self.started = self.clock.now()
        self.engines: dict[str, Engine] = {}
        self.pools: dict[str, Pool] = {}
        self.draining = False
        self.on_drain: Callable[[], None] | None = None
        """Called when it begins to drain."""
        self.session: Any = None
        self.measures = measures
        self.traffic = Traffic(self.clock, measures)
        self.health = Health(config, self.clock)
        self._maker = PoolMaker(self, index_token)
        self.index = self._maker.index
        self.authorization = None if upstream_token is None else f"Bearer {upstream_token}"
        self.authorized = {} if self.authorization is None else {"authorization": self.authorization}
        """Headers of questions of our own to engines."""
        self._watches: dict[str, Watch] = {}
        self.names: dict[str, tuple[Pool, str | None]] = {}
        """Names that requests may use: their pool, and the adapter they mean."""
        self._changing = asyncio.Lock()
        self._making = asyncio.Lock()
        """Engines may come to know at one time that they belong to a new model."""
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def counters(self) -> Counters:
        """What became of requests."""
        return self.traffic.counters

    @property
    def recorder(self) -> TrafficRecorder | None:
        """Who writes down the traffic, where somebody does."""
        return self.traffic.recorder

    # -- beginning and end ------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Gateway:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Take in the engines of the configuration. Raises ``KvyardError`` for what can't be done."""
        import aiohttp

        config = self.config
        if config.record is not None:
            from kvyard.server.gateway.recording import TrafficRecorder

            self.traffic.recorder = TrafficRecorder(
                config.record,
                block_size=config.record_block_size,
                clock=self.clock,
                limit=config.record_limit,
                keep=config.record_keep,
            )
        # Engines close idle connections after five seconds, most of them; ours must go first, or a request meets a closed one.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=config.connect_seconds, sock_read=config.silent_seconds
        )
        self.session = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
            trust_env=False,
        )
        await self._maker.check()
        watches = [(name, DnsWatch(name.host, name.port, interval_s=name.interval_s)) for name in config.names]
        await self.index.start()
        for engine in config.engines:
            await self.add(engine)
        for url in config.fleets:
            for engine in await fleet_of(self.session, url, self.authorized):
                await self.add(engine)
        for told in config.subscriptions:
            self.index.keep(told.model_name, told.tenant)
            await self.index.register(told)
        for name, watch in watches:
            self.begin(self._follow(name, watch))
        self.begin(self._flush())

    def drain(self) -> None:
        """Say at /health that we are ending; what is under way goes on. Any thread may call it."""
        self.draining = True
        if self.on_drain is not None:
            self.on_drain()

    def begin(self, deed: Coroutine[Any, Any, None]) -> None:
        """Do something beside, until it ends or the gateway does."""
        task = asyncio.get_running_loop().create_task(deed)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s has ended: %s", task.get_name(), error, exc_info=error)

    async def _flush(self) -> None:
        """Let what was written down survive this process."""
        while True:
            await pause(1.0)
            self._maker.flush()
            if self.traffic.recorder is not None:
                self.traffic.recorder.flush()

    async def _follow(self, name: NameConfig, watch: DnsWatch) -> None:
        """Take in and let go engines as a name's addresses come and go."""
        async for change in watch.watch():
            for address in change.removed:
                with contextlib.suppress(Refusal):  # somebody else has removed it
                    await self.remove(address.netloc)
            for address in change.added:
                try:
                    await self.add(name.engine(address.netloc))
                except (KvyardError, Refusal) as error:
                    log.warning("%s of %s can't be taken in: %s", address.netloc, name.host, error)

    async def stop(self) -> None:
        """Let go of everything."""
        for watch in list(self._watches.values()):
            await watch.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.index.stop()
        if self.session is not None:
            await self.session.close()
        self._maker.close()
        if self.traffic.recorder is not None:
            self.traffic.recorder.close()

    # -- engines ----------------------------------------------------------------------------------------------------------

    async def add(self, config: EngineConfig) -> Engine:
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
                    await self.join(engine, config.model)
                except BaseException:
                    del self.engines[engine.name]
                    raise
            self._watches[engine.name] = Watch(self, engine)
            return engine

    async def remove(self, name: str) -> Engine:
        """Forget an engine, its events and all they said. What it has under way goes on. Raises ``Refusal``."""
        async with self._changing:
            engine = self.engine(name)
            await self._watches.pop(name).stop()
            del self.engines[name]
            await self.leave(engine)
            if self.measures is not None:
                self.measures.forget(name)
            return engine

    async def leave(self, engine: Engine) -> None:
        """Take an engine out of its pool, with its events and all they said."""
        if engine.pool is not None:
            engine.pool.remove(engine)
        await self._stop_listening(engine)
        engine.state = "starting"
        self.names_changed()

    async def _stop_listening(self, engine: Engine) -> None:
        if engine.heard_for is not None:
            with contextlib.suppress(Refusal):  # nobody listened
                await self.index.unregister(Unregister(model_name=engine.heard_for, instance_id=engine.name))
            engine.heard_for = None

    def engine(self, name: str) -> Engine:
        """The engine of that name. Raises ``Refusal``."""
        found = self.engines.get(name)
        if found is None:
            raise Refusal(404, f"there is no engine {name[:200]!r}", field="engine", fix="see /admin/engines")
        return found

    def drain_engine(self, name: str) -> Engine:
        """Send an engine nothing more; what it has under way goes on. Raises ``Refusal``."""
        engine = self.engine(name)
        engine.draining = True
        if engine.pool is not None:
            engine.pool.shut(engine)
        return engine

    def resume_engine(self, name: str) -> Engine:
        """Send a drained engine requests again. Raises ``Refusal``."""
        engine = self.engine(name)
        engine.draining = False
        if engine.pool is not None and engine.up:
            engine.pool.open(engine)
        return engine

    async def join(self, engine: Engine, model: str, *, lenient: bool = False) -> None:
        """Put an engine into the pool of ``model`` and listen to its events. Where that can't be done, raises ``KvyardError``
        or ``Refusal``; with ``lenient`` it is noted, and nothing is known of the engine's cache.
        """
        async with self._making:
            pool = self.pools.get(model)
            if pool is None:
                pool = self._maker.make(model, engine.config.block_size)
                if pool.sharing is not None:
                    try:
                        await pool.sharing.start()
                    except KvyardError:
                        if not lenient:
                            await pool.sharing.close()
                            raise
                    self.begin(pool.sharing.run())
                self.pools[model] = pool
        if self.config.index_url is None:
            engine.heard_for = model
            try:
                for told in engine.config.registrations(model):
                    await self.index.register(told)
            except BaseException as error:
                await self._stop_listening(engine)
                if not lenient or not isinstance(error, KvyardError | Refusal):
                    raise
                engine.streams_error = f"its events can't be followed: {error}"
                log.warning("%s: %s", engine.name, engine.streams_error)
        pool.add(engine)
        self.names_changed()

    def listeners(self, engine: Engine) -> list[Listener]:
        """Who follows an engine's events here."""
        if engine.pool is None:
            return []
        model = self.index.models.get((engine.pool.model, LOCAL))
        if model is None:
            return []
        return [one for one in model.listeners.values() if one.source.worker == engine.name]

    def names_changed(self) -> None:
        """Work out anew which names there are."""
        names: dict[str, tuple[Pool, str | None]] = {}
        for pool in self.pools.values():
            pool.names_changed()
            for engine in pool.engines.values():
                for name, base in engine.models.items():
                    names.setdefault(name, (pool, None if base is None else name))
        for model, pool in self.pools.items():
            if pool.engines:
                names[model] = (pool, None)
        self.names = names
