"""The intake: from a request's body to what a pool can place, and the exchange that carries it out."""

import hashlib
from collections.abc import Mapping
from posixpath import normpath
from typing import Any
from urllib.parse import quote

import msgspec

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.hashing import Namespace
from kvyard.index import Holder
from kvyard.router import RouteRequest
from kvyard.server.gateway.access import AccessKey, KeyRing, RateAdmission
from kvyard.server.gateway.config import GatewayConfig
from kvyard.server.gateway.disaggregation import SplitExchange, divisible
from kvyard.server.gateway.exchange import Exchange, Proxy
from kvyard.server.gateway.headers import upstream
from kvyard.server.gateway.homes import ResponseHome
from kvyard.server.gateway.members import Membership
from kvyard.server.gateway.pool import EnginePool, Placement
from kvyard.server.gateway.processes.shared_rates import SharedRates
from kvyard.server.gateway.prompting import PeekedContinuation, PeekedPrompt, PeekedResponses, not_json, read_body
from kvyard.server.gateway.reading import NOTHING
from kvyard.server.gateway.tracing import CONTEXT, Tracing
from kvyard.server.gateway.traffic import ProxiedRequest
from kvyard.server.hinting import peek_hints
from kvyard.server.http import Refusal, openai_error

BYTES_PER_TOKEN = 4
"""Of a body, where a prompt isn't read and a limit has to be kept; the engine says better at the end."""
STORED = "/v1/responses/"
"""How paths begin that are about one response."""
PASSED_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
LONG_SESSION = 128
"""Characters from which on a session's name is kept as a digest: routers remember many of them."""


class RequestIntake(msgspec.Struct, eq=False):
    """Takes requests in for one gateway."""

    config: GatewayConfig
    members: Membership
    proxy: Proxy
    keeps_authorization: bool
    """Whether what clients show goes on to engines; where we have a token, it is meant for us."""
    reads_prompts: bool = True
    """Whether prompts matter to anything here."""
    keys: KeyRing | None = None
    """Who may ask; ``None``: all who come in."""
    rates: SharedRates | None = None
    """Says what is left of their rates, where other processes draw on them too."""
    tracing: Tracing | None = None

    async def place_of(
        self, path: str, body: bytes, headers: Mapping[str, str], key: AccessKey | None = None
    ) -> tuple[str, str, EnginePool, Placement]:
        """What is to be routed: its id, the model's name, the pool and the prompt. Raises ``Refusal`` for what can't be,
        and where ``key`` is given, for what goes on from a response that isn't known to be its own.
        """
        asked = read_body(path, body, self.reads_prompts)
        name, pool, lora = self.members.find(asked.model)
        prompt, known = NOTHING, None
        reads = self.reads_prompts
        if not reads and pool.prefill is not None:
            asked, reads = read_body(path, body), True  # who computes it depends on how long it is
        if reads:
            salt = asked.cache_salt if isinstance(asked, PeekedPrompt) else None
            try:
                prompt = await pool.read(asked, lora, salt)
            except (ValueError, *DECODE_ERRORS) as error:
                raise not_json(error) from None
            if pool.remote is not None and prompt.ids is not None and prompt.keys:
                known = await pool.remote.ask(prompt.ids, Namespace(lora_name=lora, salt=salt or None))
        id_ = self.proxy.traffic.name(headers.get("x-request-id", ""))
        request = RouteRequest(id_, prompt.keys, prompt.tokens, _session(headers.get(self.config.session_header)))
        shut = pool.without(name)
        if isinstance(asked, PeekedResponses | PeekedContinuation) and asked.previous_response_id is not None:
            home = await self._home(asked.previous_response_id, key)
            if home is None and key is not None:
                raise _no_response(asked.previous_response_id, "previous_response_id")
            if home is not None and home.model == pool.model:
                shut |= pool.all_but(home.engine)
        place = Placement(request=request, shut=shut, known=known)
        if self.proxy.traffic.recorder is not None and prompt.single:
            place.hints = peek_hints(body, headers, prompt.tokens)
            place.tail = prompt.tail
        return id_, name, pool, place

    async def accept(self, path: str, body: bytes, headers: Any) -> Exchange:
        """The exchange for a request. Raises ``Refusal`` for what can't be routed."""
        traffic, most = self.proxy.traffic, self.config.held_bytes
        received = self.proxy.clock.now()
        traffic.counters.requests += 1
        key: AccessKey | None = None
        ticket: RateAdmission | None = None
        try:
            key = self._key(headers)
            if traffic.held + len(body) > most:
                raise Refusal(
                    429, f"the requests that are here have {most} bytes already", fix="try again later", Retry_After="1"
                )
            id_, name, pool, place = await self.place_of(path, body, headers, key)
            if key is not None:
                ticket = await self._ticket(key, name, place.request.num_tokens or len(body) // BYTES_PER_TOKEN)
        except BaseException as error:
            status = openai_error(error)[0] if isinstance(error, Refusal) else 500
            traffic.refused(path, status, len(body), "" if key is None else key.name)
            raise
        proxied = ProxiedRequest(
            id=id_,
            model=name,
            pool=pool.model,
            block_size=pool.router.block_size,
            size=len(body),
            received=received,
            path=path,
            key="" if key is None else key.name,
            prompt=place.request.num_tokens,
        )
        model = pool.model if len(self.members.pools) > 1 else None
        traffic.began(proxied, place.request, place.tail, model, place.hints)
        authorization = self.proxy.client.authorization
        sent = upstream(headers.raw, id_, authorization, self.keeps_authorization)
        if self.tracing is not None:
            place.trace = trace = self.tracing.begin("POST", path, headers, received)
            trace.part("read", received, self.proxy.clock.now())
            sent = [*(pair for pair in sent if pair[0] not in CONTEXT), *trace.headers()]
        splits = pool.prefill is not None and divisible(path, body)
        kind = SplitExchange if splits else Exchange
        return kind(
            proxy=self.proxy,
            proxied=proxied,
            pool=pool,
            place=place,
            path=path,
            body=body,
            headers=sent,
            ticket=ticket,
        )

    def _key(self, headers: Any) -> AccessKey | None:
        return None if self.keys is None else self.keys.find(headers.get("authorization", ""))

    async def _home(self, id_: str, key: AccessKey | None) -> ResponseHome | None:
        """Where a response is, unless it is another key's."""
        home = await self.proxy.homes.look_up(id_)
        return None if home is None or (key is not None and home.key != key.name) else home

    async def _ticket(self, key: AccessKey, model: str, tokens: int) -> RateAdmission | None:
        if self.rates is not None:
            return await self.rates.admit(key, model, tokens)
        return None if self.keys is None else self.keys.admit(key, model, tokens)

    async def accept_unknown(self, body: bytes, headers: Any, path: str, method: str) -> Exchange:
        """The exchange for a request that only engines know what to do with. Raises ``Refusal`` where there is none for it."""
        if method not in PASSED_METHODS:
            raise Refusal(405, f"{method} isn't passed on", fix=f"use {', '.join(PASSED_METHODS)}")
        plain = normpath("/" + path.lstrip("/"))  # what something on the way may make of it
        if plain.startswith(STORED):
            return await self.accept_stored(method, body, headers, plain)
        key = self._key(headers)
        try:
            model = read_body(path, body, prompts=False).model if body else None
        except Refusal:
            model = None  # it may be anything
        name, pool, _ = self.members.find(model)
        ticket = None if key is None else await self._ticket(key, name, 0)
        return self._about(pool, pool.without(name), method, body, headers, path, name, key, ticket)

    async def accept_stored(self, method: str, body: bytes | None, headers: Any, path: str) -> Exchange:
        """The exchange for a request about a response that some engine keeps. Raises ``Refusal`` where none does."""
        key = self._key(headers)
        id_ = path.removeprefix(STORED).partition("/")[0]
        home = await self._home(id_, key)
        pool = None if home is None else self.members.pools.get(home.model)
        if home is None or pool is None or home.engine not in pool.engines:
            raise _no_response(id_, "response_id")
        ticket = None if key is None else await self._ticket(key, pool.model, 0)
        return self._about(pool, pool.all_but(home.engine), method, body or b"", headers, path, pool.model, key, ticket)

    def _about(
        self,
        pool: EnginePool,
        shut: frozenset[Holder],
        method: str,
        body: bytes,
        headers: Any,
        path: str,
        model: str,
        key: AccessKey | None = None,
        ticket: RateAdmission | None = None,
    ) -> Exchange:
        """The exchange for what has no prompt."""
        traffic = self.proxy.traffic
        traffic.counters.requests += 1
        name = traffic.name(headers.get("x-request-id", ""))
        place = Placement(request=RouteRequest(name, [], 0, None), shut=shut)
        proxied = ProxiedRequest(
            id=name,
            model=model,
            pool=pool.model,
            block_size=pool.router.block_size,
            size=len(body),
            received=self.proxy.clock.now(),
            path=path,
            key="" if key is None else key.name,
        )
        traffic.began(proxied, place.request, None, None)
        sent = upstream(headers.raw, name, self.proxy.client.authorization, self.keeps_authorization)
        return Exchange(
            proxy=self.proxy,
            proxied=proxied,
            pool=pool,
            place=place,
            path=quote(path),
            body=body,
            method=method,
            headers=sent,
            ticket=ticket,
        )


def _no_response(id_: str, field: str) -> Refusal:
    """As engines say it."""
    return Refusal(404, f"Response with id '{id_[:200]}' not found.", field=field)


def _session(given: str | None) -> str | None:
    if given is None or len(given) < LONG_SESSION:
        return given
    return hashlib.blake2b(given.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
