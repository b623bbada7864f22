"""The HTTP client for engines: what is asked of them beside requests, and the connections that requests take."""

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvyard.clock import pause
from kvyard.decode_errors import DECODE_ERRORS
from kvyard.errors import KvyardError
from kvyard.openai import EventSource, ListedModels, SleepState, TokenIds
from kvyard.server.gateway.config import GatewayConfig, GatewayEngine
from kvyard.server.gateway.connections import CLOSED, LOOKED_AT, EngineAddress, EngineConnections
from kvyard.server.gateway.failures import ERRORS, EngineFailed, engine_errors
from kvyard.server.gateway.id_lists import cut_ids, read_ids
from kvyard.server.http import JSON
from kvyard.server.http_client import read_body
from kvyard.server.mock.schemas import WorkerState
from kvyard.server.weight import LARGE

PROMPTS_FAULT = frozenset({400, 413, 422})
"""Answers of /tokenize that any engine would give to that prompt."""
ADAPTER_SECONDS = 120.0
"""For loading an adapter: its weights may have to be fetched."""
ASK_SECONDS = 10.0
"""For a mock's list of its workers."""
ID_BYTES = 16
"""Bytes that each byte of a prompt may have in an answer of /tokenize, where tokens have one at least."""
ELSEWHERE = frozenset({429, 500, 502, 503, 504})
"""Answers with which another engine is asked."""


class EngineClient:
    """One session for all engines. Methods raise ``EngineFailed`` unless they say otherwise."""

    def __init__(self, config: GatewayConfig, token: str | None) -> None:
        """``token`` is shown to engines. Nothing is opened yet."""
        self.session: Any = None
        self.connections: EngineConnections | None = None
        self.authorization = None if token is None else f"Bearer {token}"
        self._headers = {} if self.authorization is None else {"authorization": self.authorization}
        self._look_headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
        self._config = config
        self.on_lost: Callable[[EngineAddress], None] | None = None
        """See ``EngineConnections``; set before it is opened."""

    def configured(self, config: GatewayConfig) -> None:
        """Use this configuration from now on; open connections keep theirs."""
        self._config = config

    def open(self) -> None:
        """Open the client on the loop that will use it."""
        # Engines close idle connections after five seconds, most of them; ours must go first, or a request meets a closed one.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._config.connect_seconds, sock_read=self._config.silent_seconds
        )
        self.session = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
            trust_env=False,
        )
        self.connections = EngineConnections(self._config.connect_seconds, self._config.silent_seconds)
        self.connections.on_lost = self.on_lost

    async def close(self) -> None:
        if self.connections is not None:
            self.connections.close()
        if self.session is not None:
            await self.session.close()

    async def health(self, address: EngineAddress) -> int:
        """Return the status of an engine's /health."""
        return (await self._look(address, b"/health"))[0]

    async def models(self, address: EngineAddress) -> ListedModels:
        """Return the models that an engine serves."""
        status, content = await self._look(address, b"/v1/models")
        if status != 200:
            raise EngineFailed(f"/v1/models answered {status}")
        try:
            return msgspec.json.decode(content, type=ListedModels)
        except DECODE_ERRORS:
            raise EngineFailed("/v1/models can't be read") from None

    async def asleep(self, address: EngineAddress) -> bool | None:
        """Return true if an engine sleeps; ``None`` if it doesn't report that, as a vLLM outside its development mode."""
        status, content = await self._look(address, b"/is_sleeping")
        if status != 200:
            return None
        try:
            return msgspec.json.decode(content, type=SleepState).is_sleeping
        except DECODE_ERRORS:
            return None

    async def event_sources(self, url: str) -> dict[int, EventSource]:
        """Return the endpoints on which an engine's ranks publish their events; none if it doesn't report them, as before
        vLLM 0.32."""
        status, content = await self._get(f"{url}/kv_event_sources", self._config.health_timeout)
        if status != 200:
            return {}
        try:
            sources = msgspec.json.decode(content, type=dict[int, EventSource])
        except DECODE_ERRORS:
            return {}
        return {
            rank: source
            for rank, source in sorted(sources.items())
            if source.enable_kv_cache_events and source.publisher == "zmq"
        }

    async def tokenize(self, url: str, body: bytes, seconds: float) -> list[int] | None:
        """Return an engine's answer to /tokenize; ``None`` where it refuses that prompt."""
        status, content = await self.post(url, "/tokenize", body, seconds, LOOKED_AT + ID_BYTES * len(body))
        if status == 200:
            try:
                return await _read_tokens(content)
            except DECODE_ERRORS:
                raise EngineFailed("/tokenize can't be read") from None
        if status in PROMPTS_FAULT:
            return None
        raise EngineFailed(f"/tokenize answered {status}")

    async def post(
        self, url: str, path: str, body: bytes, seconds: float = ADAPTER_SECONDS, most: int = LOOKED_AT
    ) -> tuple[int, bytes]:
        """Return the status and body, of at most ``most`` bytes, of an engine's answer to JSON."""
        with engine_errors():
            async with self.session.post(
                url + path,
                data=body,
                headers={"content-type": JSON, **self._headers},
                timeout=aiohttp.ClientTimeout(total=seconds),
                allow_redirects=False,
            ) as reply:
                return reply.status, await read_body(reply, most)

    async def close_session(self, url: str, session: str) -> bool:
        """Tell an engine that a session is over; returns whether it took notice. Raises nothing."""
        try:
            async with self.session.post(
                f"{url}/close_session",
                data=msgspec.json.encode({"session_id": session}),
                headers={"content-type": JSON, **self._headers},
                timeout=aiohttp.ClientTimeout(total=ASK_SECONDS),
                allow_redirects=False,
            ) as reply:
                return bool(reply.status == 200)
        except ERRORS:
            return False

    async def mock_fleet(self, url: str) -> list[GatewayEngine] | None:
        """Return the workers of a mock, with their event streams: mocks report them, real engines don't. ``None`` where it
        doesn't answer.

        Raises ``KvyardError`` for what is no mock.
        """
        try:
            status, content = await self._get(f"{url.rstrip('/')}/admin/workers", ASK_SECONDS)
        except EngineFailed:
            return None
        if status != 200:
            raise KvyardError(f"{url} doesn't list its workers: it answered {status}; give other engines with --engine")
        try:
            states = msgspec.json.decode(content, type=list[WorkerState])
        except DECODE_ERRORS as error:
            raise KvyardError(f"{url} is no mock: {error}; give other engines with --engine") from None
        return [
            GatewayEngine(
                url=state.url,
                name=state.name,
                events=[stream.endpoint for stream in state.streams] or None,
                replay=[stream.replay_endpoint for stream in state.streams if stream.replay_endpoint] or None,
                block_size=state.block_size,
                role=state.role,
                bootstrap_port=None if state.role == "both" else urlsplit(state.url).port,
                dp_size=max(1, len(state.streams)),
            )
            for state in states
        ]

    async def _look(self, address: EngineAddress, path: bytes) -> tuple[int, bytes]:
        """Like ``_get``, over one of the connections for requests: all engines are polled each second, and this costs less."""
        connections = self.connections
        if connections is None or connections.closed:
            raise asyncio.CancelledError  # the gateway ends
        try:
            async with asyncio.timeout(self._config.health_timeout):
                try:
                    return await connections.get(address, path, self._look_headers)
                except EngineFailed as failed:
                    if failed.reason != CLOSED:
                        raise
                    # It may have been idle for too long on the other side: that says nothing.
                    return await connections.get(address, path, self._look_headers)
        except TimeoutError:
            raise EngineFailed("it was silent for too long") from None

    async def _get(self, url: str, seconds: float) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=seconds)
        with engine_errors():
            async with self.session.get(url, headers=self._headers, timeout=timeout, allow_redirects=False) as reply:
                return reply.status, await read_body(reply, LOOKED_AT)


class _RawTokenIds(msgspec.Struct):
    tokens: msgspec.Raw


async def _read_tokens(content: bytes) -> list[int]:
    """Return the ids of an answer to /tokenize; those of a long one are read in turns. Raises one of ``DECODE_ERRORS``."""
    if len(content) < LARGE:
        return msgspec.json.decode(content, type=TokenIds).tokens
    raw = bytes(msgspec.json.decode(content, type=_RawTokenIds).tokens)
    if raw[:1] != b"[":
        raise msgspec.ValidationError("tokens is no list")
    ids = list[int]()
    for piece in cut_ids(raw, LARGE):
        await pause()
        ids += read_ids(piece)
    return ids
