"""Making pools: an index and a router for one more model, with whatever they are to be joined to. And how engines are asked for
the tokens of a prompt.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvyard.index import Identity, Indexer
from kvyard.openai import TokenIds
from kvyard.router import Router
from kvyard.router.journal import Journal, JournalFile
from kvyard.router.journaled import JournaledIndexer, JournaledRouter
from kvyard.server.gateway.config import BYTES, ENGINE
from kvyard.server.gateway.pool import Pool
from kvyard.server.gateway.prompting import Prompting
from kvyard.server.gateway.remote import RemoteIndex
from kvyard.server.indexer.service import DEFAULT_BLOCK_SIZE, Service
from kvyard.server.tokens import make_tokenizer

if TYPE_CHECKING:
    from kvyard.server.gateway.gateway import Gateway

LOCAL = "default"
"""The tenant under which the index in this process keeps its models."""
TOKENIZE_SECONDS = 5.0


class PoolMaker:
    """Makes the pools of one gateway, and keeps their index and their journals."""

    def __init__(self, gateway: Gateway, index_token: str | None) -> None:
        self._gateway = gateway
        self._index_token = index_token
        self.index = Service(gateway.config.index(), make=self._make_indexer, clock=gateway.clock)
        self.journals: list[JournalFile] = []
        self._first: JournalFile | None = None
        """The first journal, until a pool has it."""
        self._journal: Journal | None = None
        """The journal of the pool that is being made."""

    async def check(self) -> None:
        """See that pools can be made, now that somebody looks: they are made when an engine first answers. Raises
        ``KvyardError`` where a tokenizer, a journal or the server for sharing can't be had; one that is away is waited for.
        """
        config = self._gateway.config
        for how in {config.tokenizer, *config.tokenizers.values()} - {ENGINE, BYTES}:
            make_tokenizer(how)
        if config.share is not None:
            from kvyard.server.gateway.sharing import probe

            await probe(config.share)
        if config.journal is not None:
            self._first = JournalFile(config.journal)

    def flush(self) -> None:
        """Let journals survive this process."""
        for journal in self.journals:
            journal.flush()

    def close(self) -> None:
        """End the journals."""
        for journal in self.journals:
            journal.close()
        if self._first is not None:
            self._first.close()

    def make(self, model: str, block_size: int | None) -> Pool:
        """A pool without engines. Raises ``KvyardError`` where a tokenizer or a journal can't be had."""
        gateway = self._gateway
        config = gateway.config
        journal = self._new_journal()
        remote: RemoteIndex | None = None
        if config.index_url is not None:
            identity = config.index().identity(config.block_size or block_size or DEFAULT_BLOCK_SIZE)
            remote = RemoteIndex(
                gateway.session,
                config.index_url,
                self._index_token,
                model,
                identity,
                config.index_seconds,
                gateway.clock,
            )
            index: Indexer | Identity = identity
        else:
            self._journal = journal
            index = self.index.keep(model, LOCAL, block_size).indexer
            identity = index.identity
        router = (
            Router(config.router, (), index, config.seed)
            if journal is None
            else JournaledRouter(config.router, (), index, config.seed, journal=journal)
        )
        pool = Pool(
            model,
            router,
            Prompting(config.tokenizers.get(model, config.tokenizer), lambda body: self._tokenize(model, body)),
            gateway.clock,
            engine_requests=config.engine_requests,
            queue=config.queue,
            queue_seconds=config.queue_seconds,
            remote=remote,
        )
        if config.share is not None:
            from kvyard.server.gateway.sharing import LoadSharing

            names = identity.algorithm
            pool.sharing = LoadSharing(
                config.share,
                router,
                clock=gateway.clock,
                identity=f"{names.name} {names.seed} {pool.block_size}",
                namespace=f"{config.share_namespace}:{model}",
            )
        return pool

    def _new_journal(self) -> Journal | None:
        """A journal for one more pool: the first has the name that was given, others have their number behind it."""
        path = self._gateway.config.journal
        if path is None:
            return None
        number = len(self.journals) + 1
        if self._first is not None:
            file, self._first = self._first, None
        else:
            file = JournalFile(path if number == 1 else Path(f"{path}.{number}"))
        self.journals.append(file)
        return Journal(file.write)

    def _make_indexer(self, *given: Any, **named: Any) -> Indexer:
        if self._journal is None:
            return Indexer(*given, **named)
        return JournaledIndexer(*given, journal=self._journal, **named)

    async def _tokenize(self, model: str, body: dict[str, Any]) -> list[int] | None:
        """An engine's answer to /tokenize; the least busy one is asked."""
        import aiohttp

        pool = self._gateway.pools[model]
        up = [engine for engine in pool.engines.values() if engine.up]
        if not up:
            return None
        engine = min(up, key=lambda one: one.in_flight)
        headers = {"content-type": "application/json", **self._gateway.authorized}
        try:
            async with self._gateway.session.post(
                f"{engine.url}/tokenize",
                data=msgspec.json.encode(body),
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=TOKENIZE_SECONDS),
                allow_redirects=False,
            ) as reply:
                content = await reply.read()
            return msgspec.json.decode(content, type=TokenIds).tokens if reply.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError):
            return None
