"""Making pools: index and router of one model, with journal and load sharing as configured."""

from pathlib import Path
from typing import Any

from kvyard.clock import WallClock
from kvyard.index import Identity, Indexer
from kvyard.index.redis.names import joined
from kvyard.router import Router
from kvyard.router.deciders import make_decider
from kvyard.router.journal import Journal, JournaledIndexer, JournalFile, named
from kvyard.router.pair import router_pair
from kvyard.server.gateway.client import EngineClient
from kvyard.server.gateway.config import BYTES, ENGINE, GatewayConfig
from kvyard.server.gateway.engine_tokenizer import EngineTokenizer
from kvyard.server.gateway.pool import EnginePool
from kvyard.server.gateway.processes.process_bookings import ProcessBookings
from kvyard.server.gateway.prompting import Prompting
from kvyard.server.gateway.reading import PromptReader
from kvyard.server.gateway.remote import RemoteIndex
from kvyard.server.gateway.sharing import LoadSharing, SharedBookings, probe
from kvyard.server.indexer.service import DEFAULT_BLOCK_SIZE, Service
from kvyard.server.supervisor import Supervisor

PREFILL_ROUTER = "prefill"
"""Journal's name of the router over engines that compute prompts for others."""
LOCAL = "default"
"""The tenant under which the index in this process keeps its models."""


class PoolMaker:
    """Makes the pools of one gateway, and keeps their index and their journals."""

    def __init__(
        self,
        config: GatewayConfig,
        client: EngineClient,
        clock: WallClock,
        index_token: str | None,
        supervisor: Supervisor,
        bookings: ProcessBookings | None = None,
    ) -> None:
        """With ``bookings``, load is shared with other processes of this gateway, unless it is shared with all gateways."""
        self.index = Service(config.index(), make=self._make_indexer, clock=clock, supervisor=supervisor)
        self._config = config
        self._client = client
        self._clock = clock
        self._index_token = index_token
        self._bookings = bookings
        self.journals: list[JournalFile] = []
        """The first is there before its pool."""
        self._pools = 0
        self._of: dict[str, Journal] = {}
        """By model."""
        self._journal: Journal | None = None
        """The journal of the pool that is being made."""

    async def check(self) -> None:
        """See at the start that pools can be made: they are made later, when an engine first answers. Raises
        ``KvyardError`` where a tokenizer, a journal or the server for sharing can't be had; one that is away is waited for.
        """
        config = self._config
        for how in {config.tokenizer, *config.tokenizers.values()} - {ENGINE, BYTES}:
            Prompting(how, _nobody)
        if config.share is not None:
            await probe(config.share)
        if config.journal is not None:
            self.journals.append(JournalFile(config.journal))

    def flush(self) -> None:
        """Let journals survive this process."""
        for journal in self.journals:
            journal.flush()

    def close(self) -> None:
        """End the journals."""
        for journal in self.journals:
            journal.close()

    def make(self, model: str, block_size: int | None, roles: bool = False) -> EnginePool:
        """Return a pool without engines; ``roles``: of those that decode, where others compute prompts for them. Raises
        ``KvyardError`` where a tokenizer or a journal can't be had.
        """
        config = self._config
        journal = self._new_journal()
        policy = config.router
        if roles:
            policy = router_pair(policy, config.disaggregation.decode_router, False)[1]
        remote: RemoteIndex | None = None
        if config.index_url is not None:
            identity = config.index().identity(config.block_size or block_size or DEFAULT_BLOCK_SIZE)
            remote = RemoteIndex(self._client.session, config, self._index_token, model, identity, self._clock)
            index: Indexer | Identity = identity
        else:
            self._journal = journal
            index = self.index.keep(model, LOCAL, block_size).indexer
            identity = index.identity
        router = Router(policy, (), index, config.seed, journal=journal)
        if journal is not None:
            self._of[model] = journal

        async def tokenize(body: dict[str, Any]) -> list[int] | None:
            return await engine_tokenizer(body)

        prompting = Prompting(config.tokenizers.get(model, config.tokenizer), tokenize)
        sharing: SharedBookings | None = None
        if config.share is not None:
            names = identity.algorithm
            sharing = LoadSharing(
                config.share,
                router,
                clock=self._clock,
                identity=f"{names.name} {names.seed} {router.block_size}",
                namespace=joined(config.share_namespace, model),
            )
        indexer = index if isinstance(index, Indexer) else None
        reader = PromptReader(prompting, identity, config.prefix_bytes)
        pool = EnginePool(model, router, reader, config, self._clock, remote, sharing, indexer)
        engine_tokenizer = EngineTokenizer(pool, self._client, self._clock)
        self._share(pool, joined(model))
        return pool

    def make_prefill_pool(self, pool: EnginePool) -> EnginePool:
        """Make the prefill pool of ``pool``: the engines that compute prompts for others."""
        config = self._config
        mixed = any(engine.config.role == "both" for engine in pool.engines.values())
        policy, _ = router_pair(config.router, None, mixed)
        journal = self._of.get(pool.model)
        index = pool.indexer if pool.indexer is not None else pool.router.identity
        own_journal = None if journal is None else named(journal, PREFILL_ROUTER)
        router = Router(policy, (), index, config.seed, journal=own_journal)
        split = config.disaggregation
        pool.decider = make_decider(split.decider, split.decider_options)
        prefill_pool = EnginePool(
            pool.model,
            router,
            pool.reader,
            config,
            self._clock,
            pool.remote,
            indexer=pool.indexer,
            is_prefill=True,
        )
        self._share(prefill_pool, joined(PREFILL_ROUTER, pool.model))
        return prefill_pool

    def _share(self, pool: EnginePool, name: str) -> None:
        """Share a pool's load with the other processes; ``name`` is what they call it."""
        if self._bookings is not None and self._config.share is None:
            pool.sharing = bookings = self._bookings.make(name, pool.router)
            bookings.on_changed(pool.load_changed)

    def _new_journal(self) -> Journal | None:
        """Return a journal for one more pool: the first has the name that was given, others have their number behind it."""
        path = self._config.journal
        if path is None:
            return None
        if self._pools == len(self.journals):
            self.journals.append(JournalFile(Path(f"{path}.{self._pools + 1}")))
        self._pools += 1
        return self.journals[self._pools - 1].write

    def _make_indexer(self, *given: Any, **named: Any) -> Indexer:
        if self._journal is None:
            return Indexer(*given, **named)
        return JournaledIndexer(*given, journal=self._journal, **named)


async def _nobody(body: dict[str, Any]) -> list[int] | None:
    return None
