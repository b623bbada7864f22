"""The service: models, the streams followed for each, and answers. No HTTP here.

One index per (model, tenant). A worker that is registered is followed until it is unregistered, and then nothing of it is
left: rows, counts, group specs and its name go together, and a batch in flight is discarded.
"""

import asyncio
import logging
from collections.abc import Callable

from kvyard.blocks.geometry import resolve_geometry
from kvyard.clock import WallClock, pause
from kvyard.errors import KvyardError
from kvyard.index import Holder, Indexer, MemoryIndex, Source
from kvyard.server.http import Refusal
from kvyard.server.indexer.bootstrap import bootstrap
from kvyard.server.indexer.config import Config
from kvyard.server.indexer.listener import IndexedModel, Listener
from kvyard.server.indexer.schemas import ModelRequest, Register, Unregister
from kvyard.server.networks import Networks
from kvyard.server.running import AsyncService
from kvyard.server.supervisor import Supervised, Supervisor, Work

log = logging.getLogger(__name__)

DEFAULT_BLOCK_SIZE = 16
TICK = 0.25
"""Seconds between looks at what an index on a server has to do."""


class Service(AsyncService):
    """All models. Everything is called on one event loop."""

    def __init__(
        self,
        config: Config,
        token: str | None = None,
        *,
        make: Callable[..., Indexer] = Indexer,
        clock: WallClock | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        """``token`` is shown to peers; ``make`` makes an index in memory; ``supervisor`` is that of the server around it.
        Raises ``KvyardError`` for settings that can't go together.
        """
        if config.peers and config.backend != "memory":
            raise KvyardError("peers are for the memory backend: replicas on Redis share their rows already")
        self.config = config
        self.token = token
        self._networks = Networks(config.networks)
        self.clock = clock or WallClock()
        self._make = make
        self.models: dict[tuple[str, str], IndexedModel] = {}
        self.ready = False
        self.beside: dict[str, Work] = {}
        """Other tasks to run while it does, by name."""
        self._changing = asyncio.Lock()
        self.supervisor = supervisor or Supervisor()
        self._running: list[Supervised] = []
        self._kept: set[tuple[str, str]] = set()
        """Models that stay although no worker is registered here."""

    # -- who there is -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen to what is configured, after having learnt from a peer. Raises ``KvyardError`` for what can't be done."""
        opened: list[Listener] = []
        for label in self.config.models:
            name, _, tenant = label.partition(":")
            self.keep(name, tenant or "default")
        for number, registration in enumerate(self.config.subscriptions):
            try:
                opened += await self.open(registration)
            except Refusal as refusal:
                raise KvyardError(f"subscriptions[{number}]: {refusal}; {refusal.problem.fix}") from None
        if self.config.peers:
            opened += await bootstrap(self.config.peers, self.token, self.models, self.open, opened, self.clock)
        for listener in opened:
            listener.start(self.supervisor)
        if self.config.backend != "memory":
            self._running.append(self.supervisor.keep("index server", self._tick))
        self._running += [self.supervisor.keep(name, work) for name, work in self.beside.items()]
        self.ready = True

    def keep(self, name: str, tenant: str = "default", block_size: int | None = None) -> IndexedModel:
        """Return the model, which stays from now on, registered workers or not. ``block_size`` is that of a new index."""
        key = (name, tenant)
        model = self.models.get(key)
        if model is None:
            model = self.models[key] = self._new_model(name, tenant, block_size)
        self._kept.add(key)
        return model

    async def stop(self) -> None:
        """Stop listening."""
        self.ready = False
        for task in self._running:
            await task.stop()
        listeners = [listener for model in self.models.values() for listener in model.listeners.values()]
        await asyncio.gather(*(listener.stop() for listener in listeners))
        for model in self.models.values():
            model.indexer.close()

    async def _tick(self) -> None:
        """Do what an index on a server has to do from time to time: leases, and what other replicas say."""
        while True:
            for model in list(self.models.values()):
                model.indexer.tick(self.clock.now())
            await pause(TICK)

    async def register(self, registration: Register) -> list[str]:
        """Listen to one more worker, or more ranks of one. Raises ``Refusal`` or ``KvyardError``, changing nothing."""
        await self._networks.check([registration.endpoint, registration.replay_endpoint])
        async with self._changing:
            opened = await self.open(registration)
            for listener in opened:
                listener.start(self.supervisor)
            return [listener.source.stream for listener in opened]

    async def open(self, registration: Register, block_size: int | None = None) -> list[Listener]:
        """Return listeners that have subscribed and don't apply yet. ``block_size`` is that of a new index, if it isn't
        configured.
        """
        registration.check()
        ranks = range(registration.dp_rank or 0, (registration.dp_rank or 0) + registration.dp_size)
        model = self.models.get((registration.model_name, registration.tenant))
        if model is None:
            finest = min((group.block_size for group in registration.groups or ()), default=None)
            model = self._new_model(
                registration.model_name, registration.tenant, block_size, registration.block_size, finest
            )
        listeners: list[Listener] = []
        try:
            for offset, rank in enumerate(ranks):
                listeners.append(self._listener(model, registration, rank, offset))
            for listener in listeners:
                listener.subscriber.open()
        except BaseException:
            for listener in listeners:
                await listener.stop()
            raise
        # Nothing fails from here on.
        self.models[registration.model_name, registration.tenant] = model
        for listener in listeners:
            model.indexer.register(listener.source)
            model.listeners[listener.source.stream] = listener
        if registration.instance_id is not None:
            model.ids[str(registration.instance_id)] = registration.instance_id
        if registration.pool is not None:
            holders = [Holder(str(member.instance_id), member.dp_rank) for member in registration.members]
            model.indexer.share(registration.pool, {*model.indexer.places.members.get(registration.pool, ()), *holders})
        return listeners

    async def unregister(self, wish: Unregister) -> list[str]:
        """Remove every stream that matches. Raises ``Refusal`` if none does."""
        if (wish.instance_id is None) == (wish.pool is None):
            raise Refusal(422, "name one instance_id or one pool", field="instance_id", fix="add instance_id")
        anywhere = wish.tenant_id is None and wish.routing_group is None
        async with self._changing:
            gone: list[str] = []
            for key, model in list(self.models.items()):
                if key[0] != wish.model_name or (not anywhere and key[1] != wish.tenant):
                    continue
                for name, listener in list(model.listeners.items()):
                    if wish.matches(listener.registration):
                        await listener.stop()
                        del model.listeners[name]
                        model.indexer.unregister(name)
                        gone.append(name)
                self._tidy(key, model, {wish.pool} if wish.pool is not None else set())
            if not gone:
                raise Refusal(404, f"{wish.called} is not registered for model {wish.model_name!r}", fix="see /workers")
            return gone

    def _tidy(self, key: tuple[str, str], model: IndexedModel, gone: set[str]) -> None:
        """Remove a model without workers, names of workers without streams, and the members of pools that are ``gone``."""
        used = {listener.source.worker for listener in model.listeners.values()}
        pools = {listener.source.pool for listener in model.listeners.values()}
        for pool in gone - pools:
            model.indexer.share(pool, ())
        for name in [name for name in model.ids if name not in used]:
            del model.ids[name]
        if not model.listeners and key not in self._kept:
            model.indexer.close()
            del self.models[key]

    def _new_model(self, name: str, tenant: str, *sizes: int | None) -> IndexedModel:
        """Return a model whose index has the first block size given: by the configuration, or ``sizes``."""
        size = next(filter(None, (self.config.block_size, *sizes)), DEFAULT_BLOCK_SIZE)
        return IndexedModel(name, tenant, self._indexer(name, tenant, size))

    def _indexer(self, model: str, tenant: str, size: int) -> Indexer:
        config, identity = self.config, self.config.identity(size)
        options = dict(config.backend_options)
        try:
            if config.backend == "memory":
                store = MemoryIndex(**options)
                return self._make(identity, store, weights=config.weights, trust=config.trust)
            from kvyard.index.redis import SharedIndexer
            from kvyard.index.redis.names import joined

            given = options.pop("namespace", None)
            options["namespace"] = joined(*([] if given is None else [given]), model, tenant)
            return SharedIndexer(
                identity=identity, weights=config.weights, trust=config.trust, clock=self.clock, **options
            )
        except TypeError as error:
            raise KvyardError(f"backend_options don't fit the {config.backend} backend: {error}") from None

    def _listener(self, model: IndexedModel, registration: Register, rank: int, offset: int) -> Listener:
        single = registration.for_rank(rank, offset)
        name = registration.stream_name(rank)
        known = model.listeners.get(name)
        if known is not None:
            raise Refusal(
                409,
                f"{registration.called} rank {rank} is registered already, at {known.registration.endpoint}",
                field="instance_id",
                fix="unregister it first, or give this stream another name by stream",
            )
        groups = (
            None
            if registration.groups is None
            else [group.spec(f"groups[{number}]") for number, group in enumerate(registration.groups)]
        )
        if groups is not None:
            resolve_geometry(groups, scheduler_block_size=registration.alignment)
        source = Source(
            stream=name,
            worker="" if registration.instance_id is None else str(registration.instance_id),
            rank=rank,
            pool=registration.pool or "",
            by_rank=registration.rank_from_events,
            groups=groups,
            alignment=registration.alignment,
            clear_scope=registration.clear_scope,
        )
        return Listener(source, single, model.indexer, self.config.streams, self.clock)

    # -- answers ----------------------------------------------------------------------------------------------------

    def model(self, asked: ModelRequest) -> IndexedModel:
        """Return the model that a request names. Raises ``Refusal`` if it isn't served."""
        indexed = self.models.get((asked.model_name, asked.tenant))
        if indexed is None:
            known = ", ".join(sorted(model.label for model in self.models.values())[:10])
            raise Refusal(
                404,
                f"no worker is registered for model {asked.model_name!r}, tenant {asked.tenant!r}",
                field="model_name",
                fix=f"there are {known}" if known else "register a worker first",
            )
        return indexed
