"""The gateway's routes: the OpenAI API, which goes to engines, and its own, which say and change how that is done."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import msgspec

from kvyard import openai
from kvyard.clock import SECOND
from kvyard.errors import KvyardError
from kvyard.router.policies import make_policy
from kvyard.server.application import Application
from kvyard.server.cors import Cors
from kvyard.server.dashboard.routes import Dashboard
from kvyard.server.dashboard.view import ExpectationView, by_label
from kvyard.server.gateway import schemas
from kvyard.server.gateway.access import AccessKey, KeyFile
from kvyard.server.gateway.access.keys import not_for_key
from kvyard.server.gateway.adapters import LOAD, UNLOAD, AdapterChange, AdapterRoutes, AdapterWish
from kvyard.server.gateway.config import GatewayConfig, GatewayEngine
from kvyard.server.gateway.disaggregation import divisible, would_split
from kvyard.server.gateway.engine import Engine
from kvyard.server.gateway.exchange import Proxy
from kvyard.server.gateway.gateway import Gateway
from kvyard.server.gateway.homes import ResponseHomes
from kvyard.server.gateway.intake import RequestIntake
from kvyard.server.gateway.processes.channel import Channel
from kvyard.server.gateway.processes.part import GatewayPart
from kvyard.server.gateway.processes.shared_homes import SharedHomes
from kvyard.server.gateway.processes.shared_rates import SharedRates
from kvyard.server.gateway.processes.whole import WholeGateway
from kvyard.server.gateway.prompting import PeekedBody
from kvyard.server.gateway.traffic import P
from kvyard.server.gateway.view import GatewaySource, engine_info, state_samples
from kvyard.server.guard import Guard
from kvyard.server.health import Readiness, readiness
from kvyard.server.http import ANY_METHOD, JSON, Operation, Raw, Refusal, check_token, get, picked, post
from kvyard.server.networks import Networks

Headers = Mapping[str, str]

ADMIN_CLOSED = (
    "there is a token for clients and none for /admin: "
    "give --admin-token-file or KVYARD_ADMIN_TOKEN, the clients' own if they may"
)

PASSED = {
    openai.CHAT: ("Answer a conversation.", openai.ChatRequest),
    openai.COMPLETIONS: ("Go on with a text.", openai.CompletionRequest),
    "/v1/embeddings": ("Embeddings.", PeekedBody),
    "/v1/responses": ("OpenAI's responses.", PeekedBody),
    "/v1/messages": ("Anthropic's messages.", PeekedBody),
    "/v1/messages/count_tokens": ("How many tokens Anthropic's messages have.", PeekedBody),
    "/v1/chat/completions/batch": ("Answer several conversations.", PeekedBody),
    "/v1/rerank": ("Rank documents.", PeekedBody),
    "/v1/score": ("Score pairs of texts.", PeekedBody),
    "/tokenize": ("Text or a conversation as ids.", PeekedBody),
    "/detokenize": ("Ids as text.", PeekedBody),
}
"""Routes to engines: conversations and texts by their prompts, the others by load."""


class GatewayRoutes(msgspec.Struct, eq=False):
    """Handlers of the gateway's routes."""

    gateway: Gateway
    intake: RequestIntake
    admin_token: str | None = None
    """If set, routes that show or change engines require it."""
    admin_closed: str = ""
    """Why those routes are closed."""
    networks: Networks = Networks(())
    """Networks of engines."""
    part: GatewayPart | None = None
    """Part of this process, if it is one of several."""
    whole: WholeGateway | None = None
    """And how all of them are."""

    async def models(self, body: None, headers: Headers) -> openai.ModelList:
        """Every model and adapter that some engine serves."""
        created = self.gateway.started // SECOND
        cards: list[openai.ModelCard] = []
        key = None if self.intake.keys is None else self.intake.keys.find(headers.get("authorization", ""))
        for name, (pool, lora) in self.gateway.members.names.items():
            if key is not None and not key.allows(name):
                continue
            listed = [engine.listed[name] for engine in pool.engines.values() if name in engine.listed]
            lengths = [listed_model.max_model_len for listed_model in listed if listed_model.max_model_len is not None]
            root = next((listed_model.root for listed_model in listed if listed_model.root), pool.model)
            card = openai.ModelCard(id=name, created=created, root=root, parent=None if lora is None else pool.model)
            # The shortest, where engines differ: that much any of them takes.
            card.max_model_len = min(lengths, default=None)
            cards.append(card)
        return openai.ModelList(data=cards)

    async def explain(self, body: schemas.ExplainRoute, headers: Headers) -> schemas.RouteExplained:
        """Explain which engine would get a request. Sends nothing."""
        path = body.path or (openai.CHAT if "messages" in body.body else openai.COMPLETIONS)
        given = {} if body.session is None else {self.gateway.config.session_header: body.session}
        asked = msgspec.json.encode(body.body)
        key = self._explained(headers.get("authorization", ""))
        name, pool, place = await self.intake.place_of(path, asked, given, key=key)
        if key is not None and not key.allows(name):
            raise not_for_key(name)
        try:
            decision = pool.preview(place)
        except KvyardError as error:
            raise Refusal(503, str(error), fix="see /admin/engines", Retry_After="1") from None
        chosen = {candidate.worker.name for candidate in decision.candidates}
        over, first = would_split(pool, place, name) if divisible(path, asked) else (None, None)
        absent = {engine.name: _absence(engine, name) for engine in pool.engines.values() if engine.name not in chosen}
        return schemas.RouteExplained(
            model=name,
            pool=pool.model,
            worker=str(decision.worker),
            url=pool.engines[decision.worker.name].url,
            **picked(decision, "policy why cost blocks"),
            tokens=decision.num_tokens,
            hit_blocks=decision.overlap,
            best_blocks=decision.best,
            best_worker=None if decision.best_worker is None else str(decision.best_worker),
            regret_blocks=decision.regret,
            block_size=pool.router.block_size,
            candidates=[
                schemas.RouteCandidate(
                    worker=str(candidate.worker),
                    tiers=by_label(candidate.tiers),
                    **picked(candidate, "cost predicted prefill_tokens active_blocks shared_blocks active_requests"),
                )
                for candidate in decision.candidates
            ],
            said=pool.router.explain(decision),
            not_considered=absent,
            handed_over=over,
            prefill_worker=None if first is None else str(first.worker),
        )

    def _explained(self, authorization: str) -> AccessKey | None:
        """Return the key; ``None`` for an operator. Raises ``Refusal`` for a key that may not ask why."""
        keys = self.intake.keys
        if keys is None:
            return None
        if self.admin_token is not None:
            with suppress(Refusal):
                check_token(authorization, self.admin_token)
                return None
        return keys.explains_to(authorization)

    def _check_explain(self, authorization: str) -> None:
        self._explained(authorization)

    async def health(self, body: None, headers: Headers) -> Raw:
        """State of everything; 503 if no request can be answered."""
        if self.whole is not None:
            state = await self.whole.health()
            return Raw(msgspec.json.encode(state), JSON, 200 if state.ready else 503)
        gateway, engines = self.gateway, self.gateway.members.engines.values()
        how = readiness(gateway.conditions())
        models = gateway.index.models.values()
        able: Literal["ok", "degraded"] = "degraded" if how.degraded else "ok"
        state = schemas.GatewayHealth(
            status="draining" if gateway.draining else able if how.ready else "no engine",
            **picked(how, "live ready degraded reasons"),
            engines=dict(Counter(engine.state for engine in engines)),
            streams=dict(Counter(listener.info().state for model in models for listener in model.listeners.values())),
            under_way=gateway.traffic.counters.under_way,
            queued=sum(len(pool.waiting) for pool in self.gateway.members.pools.values()),
        )
        return Raw(msgspec.json.encode(state), JSON, 200 if state.ready else 503)

    async def ready(self, body: None, headers: Headers) -> Raw:
        """Readiness, and the reasons if it isn't ready."""
        how = readiness(self.gateway.conditions()) if self.whole is None else await self.whole.ready()
        return Raw(msgspec.json.encode(how), JSON, 200 if how.ready else 503)

    async def ping(self, body: None, headers: Headers) -> Raw:
        """Liveness of this process."""
        return Raw(b"", "text/plain")

    async def metrics(self, body: None, headers: Headers) -> Raw:
        """Metrics for Prometheus."""
        return Raw(*(self.gateway.metrics.text() if self.whole is None else await self.whole.metrics()))

    async def close_session(self, body: openai.EndedSession, headers: Headers) -> schemas.SessionClosed:
        """Tell all engines that a session is over, since any may have parts of it."""
        ups = [engine for engine in self.gateway.members.engines.values() if engine.up]
        closed = await asyncio.gather(*(self.gateway.client.close_session(ready.url, body.session_id) for ready in ups))
        return schemas.SessionClosed(engines=[ready.name for ready, did in zip(ups, closed, strict=True) if did])

    # -- engines --------------------------------------------------------------------------------------------------------

    async def engines(self, body: None, headers: Headers) -> list[schemas.EngineInfo]:
        """Engines and their state."""
        if self.whole is not None:
            return await self.whole.engines()
        members = self.gateway.members
        return [engine_info(members, engine) for engine in members.engines.values()]

    async def add(self, body: GatewayEngine, headers: Headers) -> schemas.EngineInfo:
        """Take an engine in."""
        named = [body.events, body.replay]
        listed = [each for part in named for each in (part if isinstance(part, list) else [part])]
        await self.networks.check([body.url, *listed])
        if self.part is not None:
            return await self._info(await self.part.change("add", body.called, body))
        return await self._info(await self.gateway.members.add(body))

    async def remove(self, body: schemas.NamedEngine, headers: Headers) -> schemas.EngineInfo:
        """Remove an engine."""
        if self.part is not None:
            return await self._info(await self.part.change("remove", body.engine))
        return await self._info(await self.gateway.members.remove(body.engine))

    async def drain(self, body: schemas.NamedEngine, headers: Headers) -> schemas.EngineInfo:
        """Send an engine nothing more."""
        if self.part is not None:
            return await self._info(await self.part.change("drain", body.engine))
        return await self._info(self.gateway.members.drain(body.engine))

    async def resume(self, body: schemas.NamedEngine, headers: Headers) -> schemas.EngineInfo:
        """Send a drained engine requests again."""
        if self.part is not None:
            return await self._info(await self.part.change("resume", body.engine))
        return await self._info(self.gateway.members.resume(body.engine))

    async def expectation(self, body: ExpectationView, headers: Headers) -> ExpectationView:
        """Show hits owed and counted on the dashboard, as kvyard expect --watch finds them."""
        self.gateway.expectation = body
        return body

    async def _info(self, engine: Engine) -> schemas.EngineInfo:
        own = engine_info(self.gateway.members, engine)
        if self.whole is None:
            return own
        return next((info for info in await self.whole.engines() if info.name == engine.name), own)

    def passed(self) -> list[Operation]:
        """Return routes whose requests go to engines, and what is answered for all of them."""
        passed = [
            Operation(
                method="POST",
                path=path,
                summary=f"{summary} Goes to an engine.",
                handler=partial(self.intake.accept, path),
                body=kind,
                raw=True,
                abandoned_with_client=True,
                media_types=(JSON, "text/event-stream"),
                refusals=(404, 405, 429, 502, 503, 504),
            )
            for path, (summary, kind) in PASSED.items()
        ]
        return [
            *passed,
            Operation(
                method="GET",
                path="/v1/responses/{response_id}",
                summary="A response, from the engine that made it.",
                handler=self.intake.accept_stored,
                abandoned_with_client=True,
                refusals=(404, 502, 503),
            ),
            Operation(
                method="POST",
                path="/v1/responses/{response_id}/cancel",
                summary="Cancel a response, at the engine that makes it.",
                handler=self.intake.accept_stored,
                body=PeekedBody,
                raw=True,
                abandoned_with_client=True,
                refusals=(404, 502, 503),
            ),
            get("/v1/models", self.models, openai.ModelList),
        ]

    def unknown(self) -> Operation:
        """Return the operation for unknown paths."""
        return Operation(
            method=ANY_METHOD,
            path="/{path}",
            summary="Whatever else engines answer.",
            handler=self.intake.accept_unknown,
            body=PeekedBody,
            raw=True,
            abandoned_with_client=True,
        )

    def own(self) -> list[Operation]:
        """Return routes that show and change how it is."""
        admin: dict[str, Any] = {"token": self.admin_token, "guarded": True, "closed": self.admin_closed}
        s, info, text = schemas, schemas.EngineInfo, ("text/plain",)
        adapters = AdapterRoutes(self.gateway.members, self.gateway.client)
        explains = admin if self.intake.keys is None else {"door": self._check_explain, "guarded": True}
        return [
            post("/explain", self.explain, s.ExplainRoute, s.RouteExplained, refusals=(404, 503), **explains),
            post("/close_session", self.close_session, openai.EndedSession, s.SessionClosed, **admin),
            get("/health", self.health, s.GatewayHealth, open=True, refusals=(503,)),
            get("/ready", self.ready, Readiness, open=True, refusals=(503,)),
            get("/ping", self.ping, media_types=text, open=True),
            get("/metrics", self.metrics, media_types=text, open=True),
            get("/admin/engines", self.engines, list[schemas.EngineInfo], **admin),
            post("/admin/engines", self.add, GatewayEngine, info, status=201, refusals=(409,), **admin),
            post("/admin/remove", self.remove, s.NamedEngine, info, refusals=(404,), **admin),
            post("/admin/drain", self.drain, s.NamedEngine, info, refusals=(404,), **admin),
            post("/admin/resume", self.resume, s.NamedEngine, info, refusals=(404,), **admin),
            post("/admin/expectation", self.expectation, ExpectationView, ExpectationView, **admin),
            *(
                Operation(
                    method="POST",
                    path=path,
                    summary=f"{what} an adapter at all engines of a model.",
                    handler=partial(adapters.change, path),
                    body=AdapterWish,
                    raw=True,
                    reply=AdapterChange,
                    refusals=(404, 502, 503),
                    **admin,
                )
                for path, what in ((LOAD, "Load"), (UNLOAD, "Unload"))
            ),
        ]


def _absence(engine: Engine, name: str) -> str:
    if not engine.up:
        return f"{engine.state}: {engine.reason}"
    if engine.draining:
        return "it drains"
    if engine.config.role == "prefill":
        return "it computes prompts for others"
    if not engine.serves(name):
        return f"it doesn't serve {name}"
    return "it has as many requests as it may have"


def build(
    config: GatewayConfig,
    *,
    token: str | None = None,
    upstream_token: str | None = None,
    index_token: str | None = None,
    admin_token: str | None = None,
    channel: Channel | None = None,
    keys: KeyFile | None = None,
) -> tuple[Application | Cors, Gateway]:
    """Return the application, and the gateway that is to run around it; with a ``channel``, of one process of several. ``keys``
    are those of the file, where it was read before. Raises ``KvyardError``.
    """
    app, gateway, _ = assemble(
        config,
        title="kvyard gateway",
        token=token,
        upstream_token=upstream_token,
        index_token=index_token,
        admin_token=admin_token,
        channel=channel,
        keys=keys,
    )
    return app, gateway


def assemble(
    config: GatewayConfig,
    *,
    title: str,
    proxies: bool = True,
    token: str | None = None,
    upstream_token: str | None = None,
    index_token: str | None = None,
    admin_token: str | None = None,
    channel: Channel | None = None,
    keys: KeyFile | None = None,
) -> tuple[Application | Cors, Gateway, RequestIntake]:
    """Like ``build``, and return the intake that its routes use. Without ``proxies``, requests arrive some other way, and the
    application has only routes of its own.
    """
    gateway = Gateway(config, upstream_token=upstream_token, index_token=index_token, channel=channel, keys=keys)
    members, traffic, index = gateway.members, gateway.traffic, gateway.index
    gateway.metrics.sources.append(lambda: state_samples(members, traffic, index))
    gateway.metrics.sources.append(gateway.samples)
    homes = ResponseHomes() if channel is None else SharedHomes(channel)
    proxy = Proxy(gateway.client, gateway.health, traffic, gateway.clock, config.retries, homes)
    # Clients aren't operators unless the configuration says so: who may add engines can have the gateway connect anywhere.
    ring = gateway.keys
    if ring is not None and token is not None:
        ring.also(token)
    closed = ADMIN_CLOSED if (token is not None or ring is not None) and admin_token is None else ""
    guard = Guard(config.host, tuple(config.hosts)).check
    reads = make_policy(config.router).needs_keys or bool(config.record or config.journal or config.share)
    intake = RequestIntake(config, members, proxy, token is None and ring is None, reads, ring, tracing=gateway.tracing)
    if ring is not None and channel is not None:
        intake.rates = SharedRates(channel, ring)

    held = gateway.held
    gateway.metrics.sources.append(partial(held.samples, P))

    def configured(changed: GatewayConfig) -> None:
        intake.config = changed
        proxy.retries = changed.retries
        held.limit = changed.held_bytes

    gateway.reloading.changed.append(configured)
    routes = GatewayRoutes(gateway, intake, admin_token, closed, Networks(config.networks))
    view, look = GatewaySource(gateway).view, None
    if channel is not None:
        routes.part = GatewayPart(gateway, channel, view)
        routes.whole = WholeGateway(routes.part)
        view, look = routes.whole.view, routes.whole.look
    operations = [*(routes.passed() if proxies else ()), *routes.own()]
    intake.known_paths = frozenset(operation.path for operation in operations)
    app = Application(
        operations,
        title=title,
        bounds=config.limits,
        held=held,
        token=token,
        door=None if ring is None else ring.check,
        guard=guard,
        unknown=routes.unknown() if proxies and config.pass_unknown else None,
        openai=True,
    )
    dashboard = Dashboard(view, admin_token, closed=closed, guard=guard, look=look)
    if channel is not None:
        dashboard.feed.idle_interval *= channel.processes  # each look asks all of them
    gateway.on_drain.append(dashboard.feed.close)
    gateway.beside["dashboard"] = dashboard.feed.remember
    app.add(dashboard.operations())
    served = Cors(app, config.cors_origins) if config.cors_origins else app
    return served, gateway, intake
