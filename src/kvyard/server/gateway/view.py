"""The gateway's view for people: its dashboard, and samples for Prometheus. It changes nothing."""

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from kvyard.clock import MS, SECOND, cpu_seconds
from kvyard.index import Holder, Indexer
from kvyard.index.memory import MemoryIndex
from kvyard.index.metrics import Sample, collect
from kvyard.router.explain import REASONS, explain
from kvyard.router.policies import Policy, make_policy
from kvyard.server.dashboard.view import (
    DecisionView,
    FleetView,
    PromisesView,
    StreamView,
    TierView,
    Totals,
    WorkerState,
    WorkerStatus,
    by_label,
)
from kvyard.server.garbage import TIMES
from kvyard.server.gateway.engine import Engine
from kvyard.server.gateway.gateway import Gateway
from kvyard.server.gateway.members import Membership
from kvyard.server.gateway.promises import CAUSES, PromiseTally
from kvyard.server.gateway.schemas import EngineInfo
from kvyard.server.gateway.traffic import GatewayTraffic, P, RecentDecision
from kvyard.server.http import picked
from kvyard.server.indexer.listener import Listener
from kvyard.server.indexer.measures import stream_samples
from kvyard.server.indexer.service import Service

STATES = ("fresh", "catching up", "stale")
AT_ONCE = 2000
"""Segments of an index that are counted in one look; one or two milliseconds."""


class GatewaySource:
    """Looks at a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._holdings = Holdings(gateway.index)

    def view(self) -> FleetView:
        """Return the fleet, now."""
        gateway = self._gateway
        members, counters = gateway.members, gateway.traffic.counters
        self._holdings.look()
        workers = [self._worker(engine) for engine in members.engines.values()]
        return FleetView(
            kind="gateway",
            at=gateway.clock.now() / SECOND,
            since=gateway.started / SECOND,
            policy=gateway.config.router.policy,
            reads=_reads(make_policy(gateway.config.router)),
            remote_index=gateway.config.index_url is not None,
            notes=self._notes(),
            workers=workers,
            streams=[
                self._stream(listener)
                for model in gateway.index.models.values()
                for listener in model.listeners.values()
            ],
            decisions=[self._decision(decision) for decision in reversed(gateway.traffic.recent)],
            reasons=CAUSES,
            expectation=gateway.expectation,
            sessions=gateway.traffic.sessions.session_views(gateway.clock.now()),
            session_count=len(gateway.traffic.sessions),
            tenants=gateway.traffic.sessions.tenant_views(),
            totals=Totals(
                **picked(counters, "requests finished refused cancelled retried under_way prompt_tokens output_tokens"),
                failed=counters.failed + counters.broken,
                queued=sum(len(pool.waiting) for pool in members.pools.values()),
                prompts=gateway.traffic.tally.prompts(),
                promises=_promises(gateway.traffic.promises),
                ttft=gateway.traffic.first_bytes.latency(gateway.clock.now()),
            ),
        )

    def _worker(self, engine: Engine) -> WorkerStatus:
        gateway = self._gateway
        state: WorkerState = engine.state
        reason = engine.reason
        if engine.draining and engine.up:
            state, reason = "draining", "it was asked to drain"
        elif engine.state == "ready" and engine.in_flight >= gateway.config.engine_requests:
            state, reason = "busy", "it has as many requests as it may have"
        return WorkerStatus(
            **picked(engine, "name model url failed prompt_tokens output_tokens"),
            state=state,
            reason=reason,
            role=engine.config.role,
            ranks=engine.config.dp_size,
            running=engine.in_flight,
            requests=engine.requests - engine.in_flight,
            tiers=self._holdings.tiers(engine.holders),
            prompts=engine.tally.prompts(),
            promises=_promises(engine.promises),
            announced_by=gateway.traffic.announced.source(engine.name),
        )

    def _stream(self, listener: Listener) -> StreamView:
        info = listener.info()
        now = self._gateway.clock.now()
        sums: dict[str, Any] = {name: listener.total(name) for name in ("gaps", "missed", "restarts")}
        known = listener.known
        heard = max((stream.updated for stream in known), default=0)
        stamped = max((stream.ts for stream in known), default=0.0)
        return StreamView(
            name=listener.source.stream,
            worker=listener.source.worker or listener.source.pool,
            **picked(info, "endpoint reason batches block_sizes"),
            **sums,
            stored=sum(feed.counters.stored for stream in known for feed in stream.feeds.values()),
            removed=sum(feed.counters.removed for stream in known for feed in stream.feeds.values()),
            state="failed" if info.status == "failed" else info.state,
            seq=info.sequence,
            epoch=sums["restarts"],
            waiting=listener.waiting,
            lag_ms=max(0.0, heard / MS - stamped * 1000) if stamped and heard else None,
            age_s=(now - heard) / SECOND if heard else None,
        )

    def _decision(self, recent: RecentDecision) -> DecisionView:
        decision = recent.decision
        pool = self._gateway.members.pools[recent.pool]
        return DecisionView(
            **picked(recent, "number at model"),
            id=str(decision.id),
            worker=str(decision.worker),
            **picked(decision, "policy cost blocks best"),
            why=REASONS.get(decision.why, decision.why),
            tokens=decision.num_tokens,
            tiers=by_label(decision.tiers),
            best_worker="" if decision.best_worker is None else str(decision.best_worker),
            said=explain(decision, pool.router.config, pool.router.block_size),
        )

    def _notes(self) -> list[str]:
        gateway = self._gateway
        notes: list[str] = []
        if gateway.draining:
            notes.append("draining: requests in flight go on")
        for pool in gateway.members.pools.values():
            if pool.remote is not None and pool.remote.error:
                notes.append(f"{pool.model}: the index doesn't answer ({pool.remote.error})")
            if pool.sharing is not None and pool.sharing.reason:
                notes.append(f"{pool.model}: load isn't shared ({pool.sharing.reason})")
        deaf = [engine.name for engine in gateway.members.engines.values() if engine.config.events is None]
        if deaf and gateway.config.index_url is None and make_policy(gateway.config.router).needs_index:
            notes.append(f"without event endpoints, so nothing is known of their caches: {', '.join(deaf[:10])}")
        recorder = gateway.traffic.recorder
        if recorder is not None and recorder.stopped:
            notes.append(f"nothing is recorded any more: {recorder.stopped}")
        for more in gateway.wrong_beside:
            notes.extend(f"{reason.about or reason.code}: {reason.why}" for reason in more())
        return notes


def _reads(policy: Policy) -> Literal["index", "memory", "load"]:
    return "index" if policy.needs_index else "memory" if policy.memory is not None else "load"


def _promises(tally: PromiseTally) -> PromisesView:
    return PromisesView(**picked(tally, "promised delivered unpromised kept broken"), missing=dict(tally.missing))


class CountedPlace(msgspec.Struct):
    """A place, as far as it was counted."""

    indexer: Indexer
    backend: MemoryIndex
    holder: Holder
    number: int
    segments: list[int] | None = None
    """Segments that are left; ``None`` before the first look."""
    blocks: int = 0


class Holdings:
    """Number of blocks in the index, by engine and tier. An index has no reason to count, so this does, a little with every
    look, and shows the latest result of each place.
    """

    def __init__(self, index: Service) -> None:
        self._index = index
        self._blocks: dict[Holder, dict[tuple[str, int | None], int]] = {}
        """By holder, then by tier and attention group."""
        self._next: list[CountedPlace] = []

    def look(self) -> None:
        """Count on."""
        if not self._next:
            self._next = self._places()
            there = {count.holder for count in self._next}
            self._blocks = {holder: blocks for holder, blocks in self._blocks.items() if holder in there}
        left = AT_ONCE
        while self._next and left > 0:
            count = self._next[-1]
            if count.number not in count.indexer.places.of.get(count.holder, ()):
                self._next.pop()
                continue
            if count.segments is None:
                count.segments = count.backend.segments_of(count.number)
            some, count.segments = count.segments[:left], count.segments[left:]
            count.blocks += count.backend.count_held(count.number, some)
            left -= len(some) + 10
            if not count.segments:
                place = count.indexer.places[count.number]
                self._blocks.setdefault(count.holder, {})[place.tier.name, place.group] = count.blocks
                self._next.pop()

    def _places(self) -> list[CountedPlace]:
        # Only what is in our own memory: asking Redis for everything once a minute would be a poor way to watch.
        return [
            CountedPlace(model.indexer, model.indexer.backend, holder, number)
            for model in self._index.models.values()
            if isinstance(model.indexer.backend, MemoryIndex)
            for holder in list(model.indexer.places.of)
            for number in model.indexer.places.of.get(holder, ())
        ]

    def tiers(self, holders: list[Holder]) -> list[TierView]:
        """Return the blocks cached by these holders together."""
        counts: dict[str, int] = {}
        for holder in holders:
            for (tier, _), count in self._blocks.get(holder, {}).items():
                counts[tier] = counts.get(tier, 0) + count
        return [TierView(name=tier, idle=count) for tier, count in sorted(counts.items())]


def engine_info(members: Membership, engine: Engine) -> EngineInfo:
    """Return an engine as /admin/engines shows it."""
    return EngineInfo(
        **picked(engine, "name url state draining reason in_flight requests failed"),
        pool=engine.model or None,
        models=list(engine.models),
        dp_size=engine.config.dp_size,
        role=engine.config.role,
        streams=[listener.info() for listener in members.listeners(engine)],
    )


def state_samples(members: Membership, traffic: GatewayTraffic, index: Service) -> Iterator[Sample]:
    """Yield everything that is kept anyway."""
    yield P + "under_way", {}, traffic.counters.under_way
    yield P + "sessions", {}, len(traffic.sessions)
    yield P + "sessions_total", {}, traffic.sessions.started
    yield P + "sessions_forgotten_total", {}, traffic.sessions.forgotten
    yield P + "cpu_seconds_total", {}, cpu_seconds()
    yield P + "garbage_searches_total", {}, TIMES.count
    yield P + "garbage_seconds_total", {}, TIMES.total / SECOND
    yield P + "garbage_longest_seconds", {}, TIMES.longest / SECOND
    for model, pool in members.pools.items():
        labels = {"model": model}
        yield P + "queued", labels, len(pool.waiting)
        yield P + "queue_refused_total", labels, pool.refused
        yield P + "queue_expired_total", labels, pool.expired
        yield P + "forgotten_total", labels, pool.router.forgotten
        yield P + "unread_prompts_total", labels, pool.reader.prompting.unread
        yield P + "prefix_bytes", labels, pool.reader.known.held
        yield P + "prefix_tokens_total", labels, pool.reader.known.found
        yield P + "prefix_differences_total", labels, pool.reader.differed
        if pool.remote is not None:
            yield P + "index_failures_total", labels, pool.remote.failures
        if pool.sharing is not None and pool.config.share is not None:
            peers, shared = pool.sharing.peers, pool.sharing.counters
            yield P + "share_connected", labels, pool.sharing.connected
            yield P + "share_peers", labels, len(peers)
            yield P + "share_foreign_requests", labels, sum(peers.values())
            yield P + "share_outages_total", labels, shared.outages
            yield P + "share_unknown_workers_total", labels, shared.unknown_workers
    if traffic.access_log is not None:
        yield P + "access_log_lost_total", {}, traffic.access_log.lost
    if traffic.recorder is not None:
        written = traffic.recorder.counters
        yield P + "recording", {}, not traffic.recorder.stopped
        yield P + "recorded_requests_total", {}, written.rows
        yield P + "recorded_bytes_total", {}, written.bytes
        yield P + "unrecorded_requests_total", {}, written.left_out + written.late
    for name, engine in members.engines.items():
        labels = {"model": engine.model, "engine": name}
        yield P + "engine_up", labels, engine.up
        yield P + "engine_draining", labels, engine.draining
        yield P + "engine_requests", labels, engine.in_flight
        yield P + "engine_failures_total", labels, engine.failed
        yield P + "engine_downs_total", labels, engine.downs
        promises = engine.promises
        yield P + "engine_promised_tokens_total", labels, promises.promised
        yield P + "engine_delivered_tokens_total", labels, promises.delivered
        yield P + "engine_unpromised_tokens_total", labels, promises.unpromised
        for reason, tokens in promises.missing.items():
            yield P + "engine_missing_tokens_total", {**labels, "reason": reason}, tokens
    for known in index.models.values():
        for name, labels, value in collect(known.indexer):
            yield name, {"model": known.name, "tenant": known.tenant, **labels}, value
        for stream, listener in known.listeners.items():
            labels = {"model": known.name, "stream": stream}
            yield P + "stream_state", labels, STATES.index(listener.info().state)
            yield from stream_samples(P, labels, listener)
