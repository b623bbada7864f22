"""The intake: from a request's body to what a pool can place, and the exchange that carries it out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from kvyard.errors import KvyardError
from kvyard.hashing import Namespace
from kvyard.router import RouteRequest
from kvyard.server.gateway import asking
from kvyard.server.gateway.gateway import Gateway
from kvyard.server.gateway.headers import upstream
from kvyard.server.gateway.pool import Place, Pool
from kvyard.server.http import Refusal

if TYPE_CHECKING:
    from kvyard.server.gateway.exchange import Exchange


LONG_SESSION = 128
"""Characters from which on a session's name is kept as a digest: routers remember many of them."""


def _session(given: str | None) -> str | None:
    if given is None or len(given) < LONG_SESSION:
        return given
    return hashlib.blake2b(given.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class Intake:
    """Takes requests in for one gateway."""

    def __init__(self, gateway: Gateway, token: str | None) -> None:
        """``token`` is what clients show us; it is never passed on."""
        self._gateway = gateway
        self._keeps_authorization = token is None

    def find(self, model: str | None) -> tuple[str, Pool, str | None]:
        """The name, pool and adapter that a request means. Raises ``Refusal`` with 404, or 503 while nobody is known."""
        if model is None:
            pools = self._gateway.pools
            # One whose engines are all gone is meant by nobody, unless it is the only one there ever was.
            there = [name for name, pool in pools.items() if pool.engines] or list(pools)
            if len(there) == 1:
                return there[0], pools[there[0]], None
            if there:
                raise Refusal(400, "model is missing, and there are several", field="model", fix="see /v1/models")
        found = None if model is None else self._gateway.names.get(model)
        if found is None:
            if not self._gateway.names or model is None:
                raise Refusal(503, "no engine has been heard of yet", fix="try again later", Retry_After="1")
            raise Refusal(404, f"The model `{model[:200]}` does not exist.", field="model", fix="see /v1/models")
        return cast(str, model), *found

    async def place_of(self, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[str, Pool, Place]:
        """What is to be routed: the id, the pool and the prompt. Raises ``Refusal`` for what can't be."""
        ask = asking.read(path, body)
        name, pool, lora = self.find(ask.model)
        prompts = await pool.prompting.prompts(ask)
        keys: list[int] = []
        tokens = 0
        known = None
        if prompts:
            tokens = sum(map(len, prompts))
            salt = ask.cache_salt if isinstance(ask, asking.PeekedCompletion | asking.PeekedChat) else None
            try:
                if len(prompts[0]) <= self._gateway.config.limits.tokens:
                    keys = pool.keys(prompts[0], lora, salt)
                    if pool.remote is not None:
                        known = await pool.remote.ask(prompts[0], Namespace(lora_name=lora, salt=salt or None))
            except KvyardError:
                keys = []
        id_ = self._gateway.traffic.name(headers.get("x-request-id", ""))
        request = RouteRequest(id_, keys, tokens, _session(headers.get(self._gateway.config.session_header)))
        place = Place(request=request, shut=pool.without(name), known=known)
        if self._gateway.traffic.recorder is not None and len(prompts) == 1:
            tail = prompts[0][len(keys) * pool.block_size :]
            place.tail = tail if len(tail) < pool.block_size else None  # a prompt that wasn't hashed isn't kept either
        return name, pool, place

    async def accept(self, path: str, body: bytes, headers: Any) -> Exchange:
        """The exchange for a request. Raises ``Refusal`` for what can't be routed."""
        from kvyard.server.gateway.exchange import Exchange

        received = self._gateway.clock.now()
        self._gateway.counters.requests += 1
        try:
            if self._gateway.traffic.held + len(body) > self._gateway.config.held_bytes:
                raise Refusal(
                    429,
                    f"the requests that are here have {self._gateway.config.held_bytes} bytes already",
                    fix="try again later",
                    Retry_After="1",
                )
            name, pool, place = await self.place_of(path, body, headers)
        except BaseException:
            self._gateway.counters.refused += 1
            if self._gateway.measures is not None:
                self._gateway.measures.refused()
            raise
        self._gateway.traffic.began(pool, place, len(body), len(self._gateway.pools) > 1)
        return Exchange(
            self._gateway,
            pool,
            place,
            name=name,
            path=path,
            body=body,
            headers=upstream(
                headers.raw, cast(str, place.request.id), self._gateway.authorization, self._keeps_authorization
            ),
            received=received,
        )
