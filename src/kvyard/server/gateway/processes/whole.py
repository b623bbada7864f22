"""The whole gateway, whichever of its processes is asked: health, engines, metrics and the dashboard's view of all of them.

A process that doesn't answer the others in time is left out, and named as a reason to be degraded.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Literal, TypeVar

import msgspec

from kvyard.server.dashboard.view import (
    MOST_DECISIONS,
    DecisionView,
    FleetView,
    PromisesView,
    TenantView,
    Totals,
    WorkerState,
    WorkerStatus,
    latency_of,
)
from kvyard.server.gateway.processes.channel import PATIENCE, Channel
from kvyard.server.gateway.processes.figures import Figures, HubState, figures_text, merged_figures
from kvyard.server.gateway.processes.part import GatewayPart, PartStatement, PartView
from kvyard.server.gateway.schemas import EngineInfo, GatewayHealth
from kvyard.server.gateway.sessions import SHOWN
from kvyard.server.gateway.traffic import NAMES, P
from kvyard.server.health import HealthReason, Readiness, readiness
from kvyard.server.http import Refusal, picked

ENGINE_STATES = ("ready", "suspect", "starting", "down")
STREAM_STATES = ("fresh", "catching up", "stale")
WORKER_STATES: tuple[WorkerState, ...] = ("ready", "busy", "suspect", "starting", "draining", "stalled", "down")
"""Each from good to bad: where processes differ, the worst is reported."""
ADDED = ("running", "waiting", "requests", "failed", "prompt_tokens", "output_tokens")
"""Of a worker."""
TOTALS = (
    *("requests", "finished", "failed", "refused", "cancelled", "retried", "under_way", "queued"),
    *("prompt_tokens", "output_tokens"),
)

TENANT = ("requests", "failed", "prompt_tokens", "cached_tokens", "output_tokens", "engines")

S = TypeVar("S", PartStatement, PartView)
_state = msgspec.msgpack.Decoder(HubState).decode
_figures = msgspec.msgpack.Decoder(list[Figures]).decode


class WholeGateway:
    """Asks all processes."""

    def __init__(self, part: GatewayPart) -> None:
        self._part = part
        self._channel: Channel = part.channel
        self._seen: FleetView | None = None

    async def health(self) -> GatewayHealth:
        """Return the state of everything."""
        states, more = await self._statements()
        how = merged_readiness(states, more)
        draining = all(state.draining for state in states)
        able: Literal["ok", "degraded"] = "degraded" if how.degraded else "ok"
        engines = merged_engines([state.engines for state in states])
        return GatewayHealth(
            status="draining" if draining else able if how.ready else "no engine",
            **picked(how, "live ready degraded reasons"),
            engines=dict(Counter(engine.state for engine in engines)),
            streams=dict(Counter(_worst([state.streams for state in states], STREAM_STATES).values())),
            under_way=sum(state.under_way for state in states),
            queued=sum(state.queued for state in states),
        )

    async def ready(self) -> Readiness:
        """Return true if requests can be answered."""
        return merged_readiness(*await self._statements())

    async def engines(self) -> list[EngineInfo]:
        """Return the engines, with all processes' requests there."""
        states, _ = await self._all("statement", self._part.statement(), PartStatement)
        return merged_engines([state.engines for state in states])

    async def metrics(self) -> tuple[bytes, str]:
        """Return the metrics in Prometheus' text format, and its media type."""
        self._part.keep()
        await self._channel.ask_others("keep")
        try:
            ended, *kept = _figures(await self._channel.ask_hub("figures"))
        except ConnectionError as error:
            # Without those that have ended counters would fall, which looks like a restart.
            raise Refusal(503, str(error), fix="try again", Retry_After="1") from None
        samples = (await self._hub()).samples
        own: Figures = [
            (
                P + name.removesuffix("_total"),
                "counter" if name.endswith("_total") else "gauge",
                NAMES[name],
                [(P + name, {}, float(value))],
            )
            for name, value in samples.items()
        ]
        return figures_text(merged_figures(ended, [*kept, own]))

    async def look(self) -> None:
        """See how all processes are; ``view`` shows it."""
        views, _ = await self._all("view", self._part.view(), PartView)
        self._seen = merged_views(views)

    def view(self) -> FleetView:
        """Return the latest view of all processes; before the first, that of this process."""
        return self._part.view().view if self._seen is None else self._seen

    async def _statements(self) -> tuple[list[PartStatement], list[HealthReason]]:
        """Return the state of all processes, and further problems. Probes mostly wait for a second: all are asked at the
        same time."""
        own = self._part.statement()
        (states, silent), hub = await asyncio.gather(self._all("statement", own, PartStatement), self._hub())
        return states, [*silent, *hub.reasons]

    async def _hub(self) -> HubState:
        try:
            return _state(await self._channel.ask_hub("state", seconds=PATIENCE))
        except ConnectionError as error:
            silent = HealthReason(code="process-silent", about="parent process", why=str(error))
            return HubState(processes=[], reasons=[silent], samples={})

    async def _all(self, what: str, own: S, kind: type[S]) -> tuple[list[S], list[HealthReason]]:
        """Return the answers of all processes, this one first, and those that didn't answer."""
        answers: dict[int, bytes] = await self._channel.ask_others(what)
        parts = [own]
        for process in sorted(answers):
            parts.append(msgspec.msgpack.decode(answers[process], type=kind))
        why = "it doesn't answer the others"
        silent = sorted(self._channel.others - answers.keys())
        return parts, [HealthReason(code="process-silent", about=f"process {process}", why=why) for process in silent]


def merged_readiness(states: Sequence[PartStatement], more: Iterable[HealthReason]) -> Readiness:
    """Return ready if one process is: others that aren't yet are a reason to be degraded."""
    parts = [readiness(state.reasons) for state in states]
    ready = any(part.ready for part in parts)
    reasons: dict[tuple[str, str], HealthReason] = {}
    for reason in (*chain.from_iterable(state.reasons for state in states), *more):
        if ready and reason.grade == "unready":
            reason = msgspec.structs.replace(reason, grade="degraded")
        reasons.setdefault((reason.code, reason.about), reason)
    return readiness(reasons.values())


def merged_engines(lists: Sequence[Sequence[EngineInfo]]) -> list[EngineInfo]:
    """Merge the lists of engines: processes' requests add up, and the worst state counts."""
    by_name: dict[str, EngineInfo] = {}
    for engine in chain.from_iterable(lists):
        known = by_name.get(engine.name)
        if known is None:
            by_name[engine.name] = msgspec.structs.replace(engine)
            continue
        for name in ("in_flight", "requests", "failed"):
            setattr(known, name, getattr(known, name) + getattr(engine, name))
        if ENGINE_STATES.index(engine.state) > ENGINE_STATES.index(known.state):
            known.state, known.reason = engine.state, engine.reason
    return list(by_name.values())


def merged_views(parts: Sequence[PartView]) -> FleetView:
    """Return one view of all processes. Caches and streams are the first one's: all follow the same streams."""
    views = [part.view for part in parts]
    first = views[0]
    totals = [view.totals for view in views]
    return msgspec.structs.replace(
        first,
        # Counters of one that began again do so too.
        since=max(view.since for view in views),
        notes=list(dict.fromkeys(note for view in views for note in view.notes)),
        workers=_workers(views),
        decisions=_decisions(views),
        sessions=sorted((total for view in views for total in view.sessions), key=lambda session: session.age_s)[
            :SHOWN
        ],
        session_count=sum(view.session_count for view in views),
        tenants=_tenants(views),
        expectation=max(
            (view.expectation for view in views if view.expectation is not None),
            key=lambda decision: decision.at,
            default=None,
        ),
        totals=Totals(
            **_sums(totals, TOTALS),
            prompts=_added([total.prompts for total in totals]),
            promises=_promises([total.promises for total in totals]),
            ttft=latency_of([took for part in parts for took in part.first_bytes]),
        ),
    )


def _workers(views: Sequence[FleetView]) -> list[WorkerStatus]:
    by_name: dict[str, list[WorkerStatus]] = {}
    for worker in (shown for view in views for shown in view.workers):
        by_name.setdefault(worker.name, []).append(worker)
    merged: list[WorkerStatus] = []
    for same in by_name.values():
        worst = max(same, key=lambda view: WORKER_STATES.index(view.state))
        merged.append(
            msgspec.structs.replace(
                same[0],
                state=worst.state,
                reason=worst.reason,
                **_sums(same, ADDED),
                prompts=_added([status.prompts for status in same]),
                promises=_promises([status.promises for status in same]),
            )
        )
    return merged


def _tenants(views: Sequence[FleetView]) -> list[TenantView]:
    """Return tenants of all processes, the one with the most tokens first."""
    by_name: dict[str, TenantView] = {}
    for tenant in chain.from_iterable(view.tenants for view in views):
        known = by_name.get(tenant.name)
        if known is not None:
            requests = known.requests + tenant.requests
            waited = known.waited_ms * known.requests + tenant.waited_ms * tenant.requests
            tenant = TenantView(name=tenant.name, waited_ms=waited / max(1, requests), **_sums([known, tenant], TENANT))
        by_name[tenant.name] = tenant
    return sorted(by_name.values(), key=lambda tenant: (-tenant.prompt_tokens - tenant.output_tokens, tenant.name))


def _decisions(views: Sequence[FleetView]) -> list[DecisionView]:
    """Return the newest of all. Processes count their own; here the time says which is new, in microseconds."""
    newest = sorted(
        (decision for view in views for decision in view.decisions), key=lambda decision: decision.at, reverse=True
    )
    return [msgspec.structs.replace(decision, number=int(decision.at * 1e6)) for decision in newest[:MOST_DECISIONS]]


def _promises(parts: Sequence[PromisesView | None]) -> PromisesView | None:
    there = [part for part in parts if part is not None]
    if not there:
        return None
    return PromisesView(
        **_sums(there, ("promised", "delivered", "unpromised", "kept", "broken")),
        missing=_added([part.missing for part in there]),
    )


def _sums(parts: Sequence[object], names: Iterable[str]) -> dict[str, Any]:
    return {name: sum(getattr(part, name) for part in parts) for name in names}


def _added(parts: Sequence[dict[str, int]]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for counts in parts:
        sums.update(counts)
    return dict(sums)


def _worst(parts: Sequence[dict[str, str]], order: Sequence[str]) -> dict[str, str]:
    worst: dict[str, str] = {}
    for name, state in (pair for part in parts for pair in part.items()):
        known = worst.get(name)
        if known is None or order.index(state) > order.index(known):
            worst[name] = state
    return worst
