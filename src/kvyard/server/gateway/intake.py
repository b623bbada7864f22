"""The intake: admits requests, finds the engines of each, and passes it to the exchange."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from kvyard.clock import MS, pause
from kvyard.decode_errors import DECODE_ERRORS
from kvyard.hashing import Namespace
from kvyard.index import Holder
from kvyard.router import RouteRequest
from kvyard.router.flow import FlowRequest
from kvyard.server.gateway.access import (
    AccessKey,
    KeyRing,
    RateAdmission,
    check_models,
    check_unknown,
    salt_of,
    with_salt,
)
from kvyard.server.gateway.config import GatewayConfig
from kvyard.server.gateway.disaggregation import SplitExchange, divisible
from kvyard.server.gateway.exchange import Exchange, Proxy
from kvyard.server.gateway.headers import upstream
from kvyard.server.gateway.homes import ResponseHome
from kvyard.server.gateway.members import Membership
from kvyard.server.gateway.pool import EnginePool, EngineRequest
from kvyard.server.gateway.processes.shared_rates import SharedRates
from kvyard.server.gateway.prompting import (
    PeekedBody,
    PeekedContinuation,
    PeekedPrompt,
    PeekedResponses,
    not_json,
    read_body,
)
from kvyard.server.gateway.proxied_request import ProxiedRequest
from kvyard.server.gateway.reading import NOTHING, ReadPrompt
from kvyard.server.gateway.sessions import PrefixSessions, session_name
from kvyard.server.gateway.tracing import CONTEXT, Tracing
from kvyard.server.hinting import peek_hints
from kvyard.server.http import Refusal, Response, openai_error
from kvyard.server.request import HttpRequest
from kvyard.server.weight import FIX, HEAVY, LARGE, too_heavy

BYTES_PER_TOKEN = 4
"""Of a body, where a prompt isn't read and a limit has to be kept; the engine reports the exact number at the end."""
STORED = "/v1/responses/"
"""Prefix of paths that are about one response."""
PASSED_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
TTFT_HEADER = "x-slo-ttft-ms"
"""Milliseconds to the first token that a client wants, by the name that GAIE's latency predictor has."""
MOST_DIGITS = 9
MOST_PRIORITY = 1 << 31


class RoutedRequest(NamedTuple):
    """Routing of a request."""

    model: str
    """Model name as the client gave it."""
    pool: EnginePool
    place: EngineRequest


Find = Callable[[str, AccessKey | None], Awaitable[RoutedRequest]]
"""Takes a request's id and its key; raises ``Refusal``."""


class RequestIntake(msgspec.Struct, eq=False):
    """Takes requests in for one gateway."""

    config: GatewayConfig
    members: Membership
    proxy: Proxy
    keeps_authorization: bool
    """True if clients' authorization is passed on to engines; with a token of our own it is meant for us."""
    reads_prompts: bool = True
    """True if prompts matter to anything here."""
    keys: KeyRing | None = None
    """Keys of clients; ``None``: all clients are served."""
    rates: SharedRates | None = None
    """Reports what is left of their rates, if other processes draw on them too."""
    tracing: Tracing | None = None
    prefixes: PrefixSessions = msgspec.field(default_factory=PrefixSessions)
    """Sessions of clients that name none."""
    known_paths: frozenset[str] = frozenset()
    """Paths with a route of their own."""

    async def place_of(
        self, path: str, body: bytes, headers: Mapping[str, str], id_: str = "", key: AccessKey | None = None
    ) -> RoutedRequest:
        """Return the routing of the request ``id_`` by its prompt. Raises ``Refusal`` for one that can't be routed, and
        with a ``key`` for one that continues a response that isn't known to be its own.
        """
        asked = await self._read(path, body, self.reads_prompts)
        key_salt = None
        if key is not None:
            check_models(key, body)
            if len(body) >= LARGE:
                await pause()
            key_salt = salt_of(key, path, body)
        name, pool, lora = self.members.find(asked.model)
        prompt, known = NOTHING, None
        reads = self.reads_prompts
        if not reads and pool.prefill_pool is not None:
            asked, reads = await self._read(path, body), True  # who computes it depends on how long it is
        if reads:
            salt = asked.cache_salt if isinstance(asked, PeekedPrompt) else None
            salt = salt if key_salt is None else key_salt
            try:
                prompt = await pool.read(asked, lora, salt, len(body) < LARGE)
            except (ValueError, *DECODE_ERRORS) as error:
                raise not_json(error) from None
            if pool.remote is not None and prompt.ids is not None and prompt.keys:
                known = await pool.remote.ask(prompt.ids, Namespace(lora_name=lora, salt=salt or None))
        session_given = session_name(headers.get(self.config.session_header))
        shut = pool.without(name)
        session = session_given
        if isinstance(asked, PeekedResponses | PeekedContinuation) and asked.previous_response_id is not None:
            home = await self._home(asked.previous_response_id, key)
            if home is None and key is not None:
                raise _no_response(asked.previous_response_id, "previous_response_id")
            if home is not None:
                session = session or home.session
                if home.model == pool.model:
                    shut |= pool.all_but(home.engine)
        owner = "" if key is None else key.name
        session = self._session(session, asked, prompt, owner)
        request = RouteRequest(id_, prompt.keys, prompt.tokens, session)
        place = EngineRequest(request=request, shut=shut, known=known, salt=key_salt, session_given=session_given)
        place.flow = self._flow_request(request, asked, headers, key)
        if self.proxy.traffic.recorder is not None and prompt.single and not await too_heavy(body):
            place.hints = peek_hints(body, headers, prompt.tokens)
            place.tail = prompt.tail
        return RoutedRequest(name, pool, place)

    def _flow_request(
        self, request: RouteRequest, asked: PeekedBody, headers: Mapping[str, str], key: AccessKey | None
    ) -> FlowRequest:
        """Return the request as flow control knows it. With keys, a key's name is its tenant."""
        now = self.proxy.clock.now()
        priority = 0
        if isinstance(asked, PeekedPrompt) and type(asked.priority) is int:
            priority = max(-MOST_PRIORITY, min(MOST_PRIORITY, asked.priority))
        tenant = (session_name(headers.get(self.config.tenant_header)) or "") if key is None else key.name
        ttft = headers.get(TTFT_HEADER, "")
        deadline = now + int(ttft) * MS if ttft.isdecimal() and len(ttft) <= MOST_DIGITS else None
        return FlowRequest(request.id, now, request.num_tokens, None, request.session, tenant, priority, deadline)

    def _session(self, named: str | None, asked: PeekedBody, prompt: ReadPrompt, owner: str) -> str | None:
        """Return the session of a request, within those of ``owner``, its key: ``named`` by its client, else its user's, else
        the one that its prompt goes on from.
        """
        if named is not None and named.startswith(f"{owner}\0"):
            return named  # of an earlier response of this key
        user = asked.user if isinstance(asked, PeekedPrompt) else None
        if named is None and isinstance(user, str) and user:
            named = f"user {session_name(user)}"
        if named is None and self.config.session_prefixes and prompt.single:
            named = self.prefixes.find(prompt.keys, prompt.tokens, owner, self.proxy.clock.now())
        return None if named is None else f"{owner}\0{named}" if owner else named

    async def begin(
        self,
        path: str,
        size: int,
        headers: Mapping[str, str],
        find: Find,
        *,
        method: str = "POST",
        estimate: int = 0,
    ) -> ProxiedRequest:
        """Admit a request, whatever it is: ``find`` says where it may go. ``size`` are the bytes of its body,
        ``estimate`` its tokens where ``find`` doesn't know them. Raises ``Refusal``; else ``end`` must be called for it.
        """
        traffic = self.proxy.traffic
        received = self.proxy.clock.now()
        traffic.counters.requests += 1
        key: AccessKey | None = None
        ticket: RateAdmission | None = None
        id_ = traffic.reserve_id(headers.get("x-request-id", ""))
        try:
            if self.keys is not None:
                key = self.keys.find(headers.get("authorization", ""))
            name, pool, place = await find(id_, key)
            if key is not None:
                ticket = await self._ticket(key, name, place.request.num_tokens or estimate)
        except BaseException as error:
            traffic.unrouted(path, _status(error, headers), size, "" if key is None else key.name, id_)
            raise
        proxied = ProxiedRequest(
            id=id_,
            model=name,
            pool=pool,
            size=size,
            received=received,
            path=path,
            key="" if key is None else key.name,
            tenant="" if place.flow is None else place.flow.tenant,
            session=place.request.session,
            prompt=place.request.num_tokens,
            place=place,
            traffic=traffic,
            clock=self.proxy.clock,
            ticket=ticket,
            explained=key is None or key.explain,
        )
        traffic.began(proxied, place, pool.model if len(self.members.pools) > 1 else None)
        if self.tracing is not None:
            proxied.trace = place.trace = self.tracing.begin(method, path, headers, received)
            proxied.trace.part("read", received, self.proxy.clock.now())
        return proxied

    async def accept(self, path: str, body: bytes, request: HttpRequest) -> Response:
        """Have an engine answer a request that has a prompt. Raises ``Refusal``."""
        finding = partial(self.place_of, path, body, request)
        proxied = await self.begin(path, len(body), request, finding, estimate=len(body) // BYTES_PER_TOKEN)
        if proxied.place.salt is not None:
            body = with_salt(body, proxied.place.salt)
        splits = proxied.pool.prefill_pool is not None and divisible(path, body)
        return await self._respond(SplitExchange if splits else Exchange, proxied, path, body, request)

    async def accept_unknown(self, body: bytes, request: HttpRequest) -> Response:
        """Have an engine answer a request that only engines know. Raises ``Refusal`` if there is none for it."""
        if request.method not in PASSED_METHODS:
            raise Refusal(405, f"{request.method} isn't passed on", fix=f"use {', '.join(PASSED_METHODS)}")
        key = None if self.keys is None else self.keys.find(request.get("authorization", ""))
        plain = check_unknown(request.path, self.known_paths, key, bool(body))
        if plain.startswith(STORED):
            return await self.accept_stored(body, request, plain)
        return await self._accept_unread(request.path, body, request, partial(self._pool_of, body, request))

    async def accept_stored(self, body: bytes | None, request: HttpRequest, path: str = "") -> Response:
        """Have the engine that keeps a response answer a request about it. Raises ``Refusal`` if none does."""
        path = path or request.path
        return await self._accept_unread(path, body or b"", request, partial(self._home_of, path))

    async def _accept_unread(self, path: str, body: bytes, request: HttpRequest, find: Find) -> Response:
        """Have an engine answer a request without a prompt."""
        proxied = await self.begin(path, len(body), request, find, method=request.method)
        return await self._respond(Exchange, proxied, quote(path), body, request)

    async def _respond(
        self, kind: type[Exchange], proxied: ProxiedRequest, path: str, body: bytes, request: HttpRequest
    ) -> Response:
        request.on_end = proxied.end_with
        sent = upstream(request.raw, proxied.id, self.proxy.client.authorization, self.keeps_authorization)
        if proxied.trace is not None:
            sent = [*(pair for pair in sent if pair[0] not in CONTEXT), *proxied.trace.headers()]
        exchange = kind(
            proxy=self.proxy,
            proxied=proxied,
            path=path,
            body=body,
            method=request.method,
            query=request.query,
            headers=sent,
            room=request,
        )
        return await exchange.respond()

    # -- where requests may go ------------------------------------------------------------------------------------------

    async def _pool_of(self, body: bytes, request: HttpRequest, id_: str, key: AccessKey | None) -> RoutedRequest:
        """Route a request to any engine of the model that its body names, if it names one."""
        if key is not None:
            if key.models and await too_heavy(body):
                raise Refusal(413, HEAVY, fix=FIX)
            check_models(key, body, request.query, request.get("content-encoding", ""))
        try:
            model = (await self._read(request.path, body, prompts=False)).model if body else None
        except Refusal:
            model = None  # it may be anything
        name, pool, _ = self.members.find(model)
        return unread(id_, name, pool, pool.without(name))

    async def _read(self, path: str, body: bytes, prompts: bool = True) -> PeekedBody:
        """Call ``read_body``, yielding to other tasks between passes over a long body."""
        if await too_heavy(body, self.config.limits.tokens):
            raise Refusal(413, HEAVY, fix=FIX)
        parts = read_body(path, body, prompts)
        if len(body) >= LARGE:
            await pause()
        return parts

    async def _home_of(self, path: str, id_: str, key: AccessKey | None) -> RoutedRequest:
        """Return the engine that keeps a response."""
        response_id = path.removeprefix(STORED).partition("/")[0]
        home = await self._home(response_id, key)
        pool = None if home is None else self.members.pools.get(home.model)
        if home is None or pool is None or home.engine not in pool.engines:
            raise _no_response(response_id, "response_id")
        return unread(id_, pool.model, pool, pool.all_but(home.engine))

    async def _home(self, id_: str, key: AccessKey | None) -> ResponseHome | None:
        """Return the engine of a response, unless it is another key's."""
        home = await self.proxy.homes.look_up(id_)
        return None if home is None or (key is not None and home.key != key.name) else home

    async def _ticket(self, key: AccessKey, model: str, tokens: int) -> RateAdmission | None:
        if self.rates is not None:
            return await self.rates.admit(key, model, tokens)
        return None if self.keys is None else self.keys.admit(key, model, tokens)


def unread(
    id_: str, model: str, pool: EnginePool, shut: frozenset[Holder], session: str | None = None
) -> RoutedRequest:
    """Return the routing of a request whose prompt isn't read."""
    return RoutedRequest(
        model, pool, EngineRequest(request=RouteRequest(id_, [], 0, session), shut=shut, session_given=session)
    )


def _status(error: BaseException, headers: Mapping[str, str]) -> int:
    """Return the status that ends a request which wasn't routed; 0 where its client hung up."""
    if isinstance(error, asyncio.CancelledError):
        return 503 if isinstance(headers, HttpRequest) and headers.ending else 0
    return openai_error(error)[0] if isinstance(error, Refusal) else 500


def _no_response(id_: str, field: str) -> Refusal:
    """Return the refusal of an unknown response, in the engines' words."""
    return Refusal(404, f"Response with id '{id_[:200]}' not found.", field=field)
