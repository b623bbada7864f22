"""Picking: from a request's headers and body to the engine that is to get it, booked as the gateway books its own.

It fails open: if a prompt can't be read in time, the request is placed by load; if the choice itself fails, the request goes to
the least busy engine. Each case is counted and reported in health.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from kvyard.clock import SECOND
from kvyard.index import Holder
from kvyard.index.metrics import Sample
from kvyard.router import Decision
from kvyard.server.epp.config import EppConfig
from kvyard.server.epp.endpoints import Endpoints
from kvyard.server.gateway.access import AccessKey
from kvyard.server.gateway.engine import Engine
from kvyard.server.gateway.gateway import Gateway
from kvyard.server.gateway.intake import RequestIntake, RoutedRequest, unread
from kvyard.server.gateway.pool import EnginePool, EngineRequest
from kvyard.server.gateway.proxied_request import ProxiedRequest
from kvyard.server.gateway.sessions import session_name
from kvyard.server.health import HealthReason
from kvyard.server.http import Refusal

log = logging.getLogger(__name__)

P = "kvyard_epp_"
LATELY = 60 * SECOND
"""Time for which a failed choice makes the picker degraded."""
RESPONSES = "/v1/responses"
OPENED = {
    "body": "the body is no JSON, is compressed, or was cut",
    "size": "the body is longer than limits.body_bytes, or all that are here are longer than held_bytes",
    "late": "reading the prompt took longer than read_seconds",
    "read": "reading the prompt failed",
    "choice": "the choice failed, and the least busy engine was taken",
}
"""Why a request went on without what should have decided it, in words."""


class PickRequest(msgspec.Struct, kw_only=True):
    """Facts about a request when it is to be placed."""

    method: str
    path: str
    """From its last /v1/ on, and without a query: data planes put prefixes before it."""
    headers: Mapping[str, str]
    body: bytes | None
    """``None`` if it isn't here."""
    unread: str = ""
    """Why it isn't, one of ``OPENED``; empty if there is none or it wasn't sent."""
    subset: list[str] | None = None
    """Endpoints that may be chosen; ``None``: any."""
    sheddable: bool = False


class Picked(msgspec.Struct, kw_only=True):
    """A request that has an engine. Where the choice failed, that engine isn't booked."""

    proxied: ProxiedRequest
    engine: Engine
    decision: Decision | None
    """``None`` where the choice failed."""
    endpoints: str
    """The engine's, and those to fall back to."""


class EndpointPicker:
    """Picks for one data plane. On the gateway's loop."""

    def __init__(self, gateway: Gateway, intake: RequestIntake, config: EppConfig) -> None:
        self.gateway = gateway
        self.intake = intake
        self.config = config
        self.endpoints = Endpoints(gateway.members.engines)
        self.opened: Counter[str] = Counter()
        """Requests that went on without what should have decided it, by reason."""
        self.streams = 0
        """Requests of the data plane that are here."""
        self.held = 0
        """Bytes of bodies that are here."""
        self.moved = self.elsewhere = 0
        """Requests that another engine answered than was named first; and those that none of ours did."""
        self._failed_at: int | None = None
        self._why = ""

    # -- picking ----------------------------------------------------------------------------------------------------------

    async def pick(self, asked: PickRequest) -> Picked:
        """Return the engine for a request; its ``proxied.end`` must be called. Raises ``Refusal`` if there is none."""

        async def find(id_: str, key: AccessKey | None) -> RoutedRequest:
            routed = await self._route(asked, id_)
            self._restrict(routed, asked)
            if asked.sheddable and self._would_wait(routed.pool, routed.place):
                raise Refusal(
                    429, "engines are busy, and this request can be shed", fix="try again later", Retry_After="1"
                )
            return routed

        # Its body doesn't stay here, so that it holds nothing.
        proxied = await self.intake.begin(asked.path, 0, asked.headers, find, method=asked.method)
        try:
            return await self._choose(proxied)
        except BaseException as error:
            proxied.end("cancelled" if isinstance(error, asyncio.CancelledError) else "refused")
            raise

    async def _choose(self, proxied: ProxiedRequest) -> Picked:
        pool, place = proxied.pool, proxied.place
        decision: Decision | None = None
        try:
            decision, engine = await pool.place(place)
            while self.endpoints.of(engine) is None:
                # Its host hasn't been looked up yet, which is rare: all others are asked about only then.
                pool.take_back(place)
                pool.release(engine, decision.id, refused=True)
                place.shut |= set(engine.holders)
                if next(self._eligible(pool, place), None) is None:
                    raise Refusal(503, f"{engine.name} has no address", fix="try again later", Retry_After="1")
                decision, engine = await pool.place(place)
            proxied.take((decision, engine))
        except Refusal:
            raise
        except Exception as error:
            self._open("choice", error)
            decision = None
            engine = min(self._eligible(pool, place), key=lambda candidate: candidate.in_flight)
        return Picked(proxied=proxied, engine=engine, decision=decision, endpoints=self._named(engine, pool, place))

    async def _route(self, asked: PickRequest, id_: str) -> RoutedRequest:
        """Return the engines that may get a request. Raises ``Refusal`` for unknown models."""
        if asked.unread:
            self._open(asked.unread)
        elif asked.body is not None and asked.method == "POST":
            try:
                async with asyncio.timeout(self.config.read_seconds):
                    return await self.intake.place_of(asked.path, asked.body, asked.headers, id_)
            except TimeoutError:
                self._open("late")
            except Refusal as refusal:
                if refusal.status != 400:
                    raise
                self._open("body")  # the engine says what is wrong with it
            except Exception as error:
                self._open("read", error)
        return self._by_load(asked, id_)

    def _by_load(self, asked: PickRequest, id_: str) -> RoutedRequest:
        """Return a request whose prompt isn't known, at any engine; a response that some engine keeps, there."""
        members, proxy = self.gateway.members, self.intake.proxy
        pools = [pool for pool in members.pools.values() if pool.engines]
        home = None
        if asked.path.startswith(f"{RESPONSES}/"):
            home = proxy.homes.find(asked.path.removeprefix(f"{RESPONSES}/").partition("/")[0])
        if home is not None and home.model in members.pools:
            pools = [members.pools[home.model]]
        if not pools:
            raise Refusal(503, "no engine is known yet", fix="try again later", Retry_After="1")
        pool = next((candidate for candidate in pools if any(map(_may_get, candidate.engines.values()))), pools[0])
        shut = frozenset() if home is None else pool.all_but(home.engine)
        return unread(id_, pool.model, pool, shut, session_name(asked.headers.get(self.config.session_header)))

    def _restrict(self, routed: RoutedRequest, asked: PickRequest) -> None:
        """Shut what may not be named to the data plane. Raises ``Refusal`` with 503 where no engine is left that is up."""
        pool, place, among = routed.pool, routed.place, ""
        if asked.subset is not None:
            wanted = set(asked.subset)
            among = f" among the {len(wanted)} endpoints that may be chosen"
            shut: set[Holder] = set()
            for engine in pool.engines.values():
                endpoint = self.endpoints.of(engine) or ""
                if endpoint not in wanted and endpoint.rpartition(":")[0].strip("[]") not in wanted:
                    shut.update(engine.holders)
            place.shut |= shut
        if next(self._eligible(pool, place), None) is None:
            raise Refusal(
                503, f"no engine of model {routed.model} is ready{among}", fix="try again later", Retry_After="1"
            )

    def _eligible(self, pool: EnginePool, place: EngineRequest) -> Iterator[Engine]:
        shut = place.shut
        there = (engine for engine in pool.engines.values() if pool.takes(engine) and _may_get(engine))
        return (engine for engine in there if not (shut and engine.holders[0] in shut))

    def _would_wait(self, pool: EnginePool, place: EngineRequest) -> bool:
        most = self.config.engine_requests
        return bool(pool.waiting) or all(engine.in_flight >= most for engine in self._eligible(pool, place))

    def _named(self, engine: Engine, pool: EnginePool, place: EngineRequest) -> str:
        chosen = self.endpoints.of(engine)
        if chosen is None:  # only where the choice failed
            raise Refusal(503, f"{engine.name} has no address", fix="try again", Retry_After="1")
        if not self.config.fallbacks:
            return chosen
        others = [other for other in self._eligible(pool, place) if other is not engine]
        others.sort(key=lambda candidate: candidate.in_flight)
        fallbacks = [self.endpoints.of(other) for other in others[: self.config.fallbacks]]
        return ",".join([chosen, *filter(None, fallbacks)])

    # -- what becomes of it -------------------------------------------------------------------------------------------------

    def served(self, picked: Picked, endpoint: str) -> None:
        """Note which endpoint the data plane says answered. If it isn't the chosen one, the request is booked there."""
        engine, proxied = self.endpoints.at(endpoint), picked.proxied
        if engine is picked.engine:
            return
        if engine is None or engine.pool is not proxied.pool:
            self.elsewhere += 1
            return
        self.moved += 1
        if proxied.booked is not None:
            proxied.computed = False
            proxied.release()
            self.gateway.health.failed(picked.engine, "the data plane went on to another engine")
        picked.engine = engine
        decision = proxied.pool.place_at(proxied.place, engine)
        if decision is not None:
            picked.decision = decision
            proxied.take((decision, engine))

    # -- how it is ------------------------------------------------------------------------------------------------------

    def _open(self, why: str, error: Exception | None = None) -> None:
        self.opened[why] += 1
        if error is not None:
            self._failed_at, self._why = self.gateway.clock.now(), f"{type(error).__name__}: {error}"[:200]
            log.error("%s, so the request went on without: %s", OPENED[why], self._why, exc_info=error)

    def conditions(self) -> Iterator[HealthReason]:
        """Yield problems beyond the gateway's own."""
        for name, why in self.endpoints.reasons.items():
            yield HealthReason(code="no-address", about=name, why=f"its host can't be looked up: {why}")
        if self._failed_at is not None and self.gateway.clock.now() - self._failed_at < LATELY:
            yield HealthReason(code="failed-open", why=f"requests went on without a choice: {self._why}")

    def samples(self) -> Iterator[Sample]:
        """Yield its metrics, beside the gateway's."""
        yield P + "streams", {}, self.streams
        yield P + "held_bytes", {}, self.held
        yield P + "moved_total", {}, self.moved
        yield P + "elsewhere_total", {}, self.elsewhere
        for why in OPENED:
            yield P + "opened_total", {"reason": why}, self.opened[why]


def _may_get(engine: Engine) -> bool:
    return engine.up and not engine.draining


TEXTS = {
    P + "streams": "Requests of the data plane that are here, answers in flight included.",
    P + "held_bytes": "Bytes of headers, and of bodies until their request has an engine.",
    P + "moved_total": "Requests answered by another engine than the first choice.",
    P + "elsewhere_total": "Requests that an endpoint answered which is no engine here.",
    P + "opened_total": "Requests that went on without what should have decided it, by reason.",
}
"""Help of each metric."""
