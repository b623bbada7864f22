"""Traffic: facts about each request in flight, for metrics, recordings and observers. It changes no route.

Metrics of the engines' streams have the names in ``kvyard.index.metrics`` and of the index service, so one dashboard serves
both. Figures that are kept anyway are read by ``view.state_samples`` at each scrape.
"""

import logging
from collections import deque
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import msgspec

from kvyard.clock import MS, SECOND, WallClock
from kvyard.errors import KvyardError
from kvyard.index.metrics import NAMES as INDEX_NAMES
from kvyard.router import Decision
from kvyard.router.flow import FlowWait
from kvyard.server.dashboard.view import MOST_DECISIONS, LatencyWindow
from kvyard.server.gateway.access_log import AccessLine, AccessLog
from kvyard.server.gateway.engine import Engine, PromptTally
from kvyard.server.gateway.pool import EnginePool, EngineRequest
from kvyard.server.gateway.promises import (
    CROSSED,
    DISTRUSTED,
    AnnouncedElsewhere,
    Promise,
    PromiseTally,
    entered,
)
from kvyard.server.gateway.recording import ArrivedRequest, RequestRecorder
from kvyard.server.gateway.sessions import EndedTurn, SessionTally
from kvyard.server.gateway.usage import AnswerTokens
from kvyard.server.metrics import Metrics, read_catalog

log = logging.getLogger(__name__)

UNMET = {"finished": "unreported", "refused": "failed", "failed": "failed", "broken": "cut", "cancelled": "cut"}
"""Why a promise was not kept, by how a request ended whose engine didn't say what it found."""
P = "kvyard_gateway_"
NAMES: dict[str, str] = read_catalog(Path(__file__).with_name("metrics.toml"))
"""Metrics beside the index's own, without the prefix."""

_FAST = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 10.0, 60.0)
_SLOW = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)


class RequestRecord(msgspec.Struct, kw_only=True, eq=False):
    """Facts about one client's request; times are nanoseconds."""

    id: str
    model: str
    """Model name as the client gave it."""
    pool: EnginePool
    size: int
    """Bytes of its body."""
    received: int
    path: str = ""
    key: str = ""
    """Name of its key."""
    tenant: str = ""
    """Tenant that it counts for; empty if unknown."""
    session: str | None = None
    """The session that it belongs to."""
    keys: Sequence[int] = ()
    """Of the whole blocks of its prompt."""
    status: int = 0
    """Of the answer."""
    prompt: int = 0
    """Tokens, as far as they are known."""
    placed: int = 0
    """Time at which it was first sent to an engine."""
    why: str = ""
    """Reason for that engine."""
    wait: FlowWait | None = None
    """Reason for its wait, if it waited."""
    tries: int = 0
    first: int = 0
    """Time of the engine's first bytes."""
    events: int = 0
    """Server-sent ones of the answer."""
    output: int = 0
    """Tokens of the answer, as far as they are known."""
    cached: int | None = None
    """Prompt tokens that the engine found in its cache, if it reports them."""
    unannounced: Sequence[int] | None = None
    """Keys of the prompt, if no engine had announced it whole when it was routed and its events will be looked at."""
    promise: Promise | None = None
    """Cached prefix expected at its engine, until that is settled."""
    engine: Engine | None = None
    """Engine that has it."""
    handed_over: bool = False
    """True if another engine computed its prompt: tokens from there count as cached if it is answered."""


class ModelSeries:
    """Series of one model."""

    __slots__ = (
        *("first", "output", "placing", "predicted", "prompt", "regret", "retries", "said_cached", "said_predicted"),
        *("said_prompt", "seconds"),
    )

    def __init__(self, metrics: "GatewayMetrics", model: str) -> None:
        self.prompt = metrics.prompt[model,]
        self.predicted = metrics.predicted[model,]
        self.regret = metrics.regret[model,]
        self.said_prompt = metrics.said_prompt[model,]
        self.said_cached = metrics.said_cached[model,]
        self.said_predicted = metrics.said_predicted[model,]
        self.output = metrics.output[model,]
        self.retries = metrics.retries[model,]
        self.seconds = metrics.seconds[model,]
        self.first = metrics.first[model,]
        self.placing = metrics.placing[model,]


class GatewayMetrics(Metrics):
    """Metrics of requests. The others are in ``sources``."""

    def __init__(self) -> None:
        super().__init__({P + name: text for name, text in NAMES.items()} | INDEX_NAMES)
        self.requests = self.counts(P + "requests_total", "model", "outcome")
        self.decisions = self.counts(P + "decisions_total", "model", "engine", "why")
        self.prompt = self.counts(P + "prompt_tokens_total", "model")
        self.predicted = self.counts(P + "predicted_cached_tokens_total", "model")
        self.regret = self.counts(P + "regret_tokens_total", "model")
        self.said_prompt = self.counts(P + "reported_prompt_tokens_total", "model")
        self.said_cached = self.counts(P + "reported_cached_tokens_total", "model")
        self.said_predicted = self.counts(P + "reported_predicted_tokens_total", "model")
        self.output = self.counts(P + "output_tokens_total", "model")
        self.retries = self.counts(P + "retries_total", "model")
        self.tenants = TenantSeries(self)
        self.seconds = self.bucketed(P + "request_seconds", _SLOW, "model")
        self.first = self.bucketed(P + "time_to_first_byte_seconds", _SLOW, "model")
        self.handovers = self.counts(P + "handovers_total", "model", "outcome")
        self.stages = self.bucketed(P + "stage_seconds", _SLOW, "model", "stage")
        self.placing = self.bucketed(P + "placing_seconds", _FAST, "model")
        self._by_model: dict[str, ModelSeries] = {}

    def of_model(self, model: str) -> ModelSeries:
        """Return the series of one model, found once."""
        series = self._by_model.get(model)
        if series is None:
            series = self._by_model[model] = ModelSeries(self, model)
        return series

    def forget(self, engine: str) -> None:
        """Remove an engine and its series: engines may come and go for ever."""
        for labels in [labels for labels in self.decisions if labels[1] == engine]:
            del self.decisions[labels]


class TenantSeries:
    """Counters by tenant. Tenants may be named by clients, so that only the first have series of their own."""

    MOST = 200
    OTHERS = "(others)"

    def __init__(self, metrics: Metrics) -> None:
        self._known: set[str] = set()
        self._requests = metrics.counts(P + "tenant_requests_total", "tenant", "outcome")
        self._prompt = metrics.counts(P + "tenant_prompt_tokens_total", "tenant")
        self._cached = metrics.counts(P + "tenant_cached_tokens_total", "tenant")
        self._output = metrics.counts(P + "tenant_output_tokens_total", "tenant")
        self._seconds = metrics.counts(P + "tenant_engine_seconds_total", "tenant")
        self._held = metrics.counts(P + "tenant_token_seconds_total", "tenant")

    def ended(self, proxied: RequestRecord, outcome: str, now: int) -> None:
        """Count a request that is over; one without a tenant isn't counted."""
        name = proxied.tenant
        if not name:
            return
        if name not in self._known:
            if len(self._known) < self.MOST or proxied.key:
                self._known.add(name)
            else:
                name = self.OTHERS
        self._requests[name, outcome].inc()
        if proxied.placed:
            seconds = (now - proxied.placed) / SECOND
            self._seconds[name,].inc(seconds)
            # An answer grows: over its time it has half of its tokens on average.
            self._held[name,].inc((proxied.prompt + proxied.output / 2) * seconds)
        if proxied.output:
            self._output[name,].inc(proxied.output)
            self._prompt[name,].inc(proxied.prompt)
            self._cached[name,].inc(proxied.cached or 0)


class TrafficCounters(msgspec.Struct):
    """Counters of requests by outcome, since the start."""

    requests: int = 0
    finished: int = 0
    refused: int = 0
    failed: int = 0
    broken: int = 0
    """Failed after their first byte went out."""
    cancelled: int = 0
    retried: int = 0
    under_way: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


class RecentDecision(msgspec.Struct, frozen=True):
    """A decision, for a dashboard."""

    number: int
    at: float
    """Seconds since 1970."""
    model: str
    pool: str
    decision: Decision


class GatewayTraffic:
    """All requests of one gateway."""

    def __init__(self, clock: WallClock, metrics: GatewayMetrics) -> None:
        self.counters = TrafficCounters()
        self.recent: deque[RecentDecision] = deque(maxlen=MOST_DECISIONS)
        self.tally = PromptTally()
        self.promises = PromiseTally()
        self.announced = AnnouncedElsewhere()
        self.first_bytes = LatencyWindow()
        self.sessions = SessionTally()
        self.recorder: RequestRecorder | None = None
        self.access_log: AccessLog | None = None
        self._clock = clock
        self._metrics = metrics
        self._ids = count(1)
        self._prefix = f"{clock.now():x}"[-8:]
        self._active: set[str] = set()
        self._decisions = 0

    def reserve_id(self, given: str) -> str:
        """Return a request's id, the client's if it is a proper one and not in use. It is in use until the request is over:
        ``unrouted`` or ``ended``.
        """
        if given and len(given) <= 128 and given.isascii() and given.isprintable() and given not in self._active:
            id_ = given
        else:
            while (id_ := f"{self._prefix}-{next(self._ids)}") in self._active:
                pass  # a client has guessed it
        self._active.add(id_)
        return id_

    def unrouted(self, path: str, status: int, size: int, key: str = "", id_: str = "") -> None:
        """Count a request that couldn't be routed; ``status`` is 0 if its client disconnected before that."""
        self._active.discard(id_)
        outcome = "refused" if status else "cancelled"
        setattr(self.counters, outcome, getattr(self.counters, outcome) + 1)
        if self.access_log is not None:
            when = self._clock.now() / SECOND
            line = AccessLine(time=when, path=path, status=status, outcome=outcome, bytes_in=size, key=key)
            self.access_log.add(line)
        # Its model's name is any client's invention, so it is no label.
        self._metrics.requests["", outcome].inc()

    def crowded_out(self, path: str, size: int) -> None:
        """Count a request that was refused before it was read because there was no room for it."""
        self.counters.requests += 1
        self.unrouted(path, 429, size)

    def began(self, proxied: RequestRecord, place: EngineRequest, model: str | None) -> None:
        """Count a request that can be routed; ``model`` is given if there are several."""
        self.counters.under_way += 1
        request = place.request
        proxied.keys = request.keys
        if self.recorder is None:
            return
        try:
            self.recorder.arrived(
                ArrivedRequest(
                    id=proxied.id,
                    keys=request.keys,
                    num_tokens=request.num_tokens,
                    key_tokens=proxied.pool.router.block_size,
                    tail=place.tail,
                    session=place.session_given,
                    model=model,
                    hints=place.hints,
                )
            )
        except KvyardError as error:
            log.warning("the recording ends: %s", error)
            self.recorder.close()

    def placed(self, proxied: RequestRecord, engine: Engine, decision: Decision) -> None:
        """Count a request that was sent to an engine."""
        metrics, pool, now = self._metrics, proxied.pool, self._clock.now()
        series = metrics.of_model(proxied.model)
        size, tokens, expected = pool.router.block_size, decision.num_tokens, decision.overlap
        engine.requests += 1
        engine.prompt_tokens += tokens
        engine.tally.add(decision, size)
        self._unmet(proxied, "failed")
        proxied.engine, proxied.why, proxied.prompt = engine, decision.why, tokens
        proxied.placed = proxied.placed or now
        if expected:
            proxied.promise = Promise(decision, size, engine.marks(), engine.downs)
        self.announced.routed(proxied.keys)
        if pool.indexer is not None and len(pool.engines) > 1 and self.announced.awaits_more(now):
            known = max(pool.indexer.matches(proxied.keys).values(), default=0)
            proxied.unannounced = proxied.keys if known < len(proxied.keys) else None
        self._decisions += 1
        self.recent.append(RecentDecision(self._decisions, now / SECOND, proxied.model, pool.model, decision))
        metrics.decisions[proxied.model, engine.name, decision.why].inc()
        if proxied.tries > 1:
            self.counters.retried += 1
            series.retries.inc()
            return
        self.counters.prompt_tokens += tokens
        self.tally.add(decision, size)
        series.placing.observe((now - proxied.received) / SECOND)
        series.prompt.inc(tokens)
        if expected:
            series.predicted.inc(expected * size)
        if decision.regret:
            series.regret.inc(decision.regret * size)

    def began_answer(self, proxied: RequestRecord) -> None:
        """Note the first bytes of an engine's answer."""
        proxied.first = now = self._clock.now()
        took = now - proxied.received
        self.first_bytes.add(now, took)
        self._metrics.of_model(proxied.model).first.observe(took / SECOND)

    def answered(self, proxied: RequestRecord, engine: Engine, decision: Decision, tokens: AnswerTokens) -> None:
        """Count a complete answer."""
        proxied.output = tokens.output if tokens.output is not None else max(0, proxied.events - 1)
        engine.output_tokens += proxied.output
        self.counters.output_tokens += proxied.output
        proxied.cached = tokens.cached
        if proxied.handed_over and tokens.cached is not None:
            cached = min(tokens.cached, decision.overlap * proxied.pool.router.block_size)
            tokens = tokens._replace(cached=cached)
            proxied.cached = cached
        if tokens.prompt is not None:
            proxied.prompt = tokens.prompt
        series = self._metrics.of_model(proxied.model)
        series.output.inc(proxied.output)
        if not decision.num_tokens and tokens.prompt:
            # A prompt that wasn't read here: the engine says how long it was.
            engine.prompt_tokens += tokens.prompt
            self.counters.prompt_tokens += tokens.prompt
            series.prompt.inc(tokens.prompt)
        if tokens.cached is not None and tokens.prompt is not None:
            series.said_prompt.inc(tokens.prompt)
            series.said_cached.inc(tokens.cached)
            series.said_predicted.inc(decision.overlap * proxied.pool.router.block_size)
            self._settle(proxied, engine, tokens.cached, tokens.prompt)
        if proxied.unannounced is not None and not proxied.handed_over:
            self._await_events(proxied.pool, engine, proxied.unannounced)

    def _await_events(self, pool: EnginePool, engine: Engine, keys: Sequence[int]) -> None:
        """Look later whose events announce a prompt that ``engine`` has computed."""
        if pool.indexer is None:
            return
        crossed = self.announced.computed(engine.name, keys, pool.indexer.matches, self._clock.now())
        if crossed in pool.engines:
            pool.engines[crossed].distrust(CROSSED)

    def split(self, proxied: RequestRecord, outcome: str) -> None:
        """Count a request by the outcome of the split: ``handed-over``, ``kept`` or ``fell-back``."""
        self._metrics.handovers[proxied.model, outcome].inc()

    def staged(self, proxied: RequestRecord, stage: str, took: int) -> None:
        """Observe the duration of a stage of a request that was handed over: ``prefill``, ``hand-over`` or ``decode``."""
        self._metrics.stages[proxied.model, stage].observe(max(0, took) / SECOND)

    def prefilled(self, proxied: RequestRecord, engine: Engine, decision: Decision, tokens: AnswerTokens) -> None:
        """Count a prompt that an engine has computed for another one."""
        size = proxied.pool.router.block_size
        engine.requests += 1
        engine.prompt_tokens += decision.num_tokens
        engine.tally.add(decision, size)
        self._metrics.decisions[proxied.model, decision.worker.name, decision.why].inc()
        self._decisions += 1
        now = self._clock.now() / SECOND
        self.recent.append(RecentDecision(self._decisions, now, proxied.model, proxied.pool.model, decision))
        if tokens.cached is None:
            return
        promise = Promise(decision, size, engine.marks(), engine.downs)
        delivered = self._judge(promise, engine, tokens.cached, tokens.prompt)
        engine.promises.unpromised += tokens.cached - delivered
        self.promises.unpromised += tokens.cached - delivered

    def _judge(self, promise: Promise, engine: Engine, cached: int, prompt: int | None) -> int:
        """Enter a promise whose engine found ``cached`` tokens; return the tokens it delivered. An engine that lacks most of
        what its events announce loses the index's trust.
        """
        own, promised = engine.promises, promise.tokens
        own.found(cached)
        delivered, missing = promise.settle(
            cached, prompt, engine.marks(), engine.downs, engine.announces, own.block_size
        )
        entered((own, self.promises), promised, delivered, missing)
        if promised and engine.phantoms.add("phantom" in missing):
            engine.distrust(DISTRUSTED)
        return delivered

    def _settle(self, proxied: RequestRecord, engine: Engine, cached: int, prompt: int) -> None:
        """Compare the hits that an engine reports with what was promised."""
        promise, proxied.promise = proxied.promise, None
        if promise is not None:
            cached -= self._judge(promise, engine, cached, prompt)
        engine.promises.unpromised += cached
        self.promises.unpromised += cached

    def _unmet(self, proxied: RequestRecord, reason: str) -> None:
        """Settle a promise whose engine will not report its hits any more; nothing if no promise is left."""
        promise, proxied.promise = proxied.promise, None
        if promise is not None and proxied.engine is not None:
            promised = promise.tokens
            entered((proxied.engine.promises, self.promises), promised, 0, {reason: promised})

    def ended(self, proxied: RequestRecord, outcome: str) -> None:
        """A request is over."""
        counters, now = self.counters, self._clock.now()
        self._metrics.tenants.ended(proxied, outcome, now)
        self._count_turn(proxied, outcome == "finished", now)
        self._unmet(proxied, UNMET[outcome])
        counters.under_way -= 1
        setattr(counters, outcome, getattr(counters, outcome) + 1)
        self._active.discard(proxied.id)
        if self.recorder is not None:
            # Without a stream the first bytes are the whole answer, and its first token wasn't seen.
            first = proxied.first if proxied.events else None
            self.recorder.ended(proxied.id, proxied.output, first_token=first, cached=proxied.cached)
        self._metrics.requests[proxied.model, outcome].inc()
        self._metrics.of_model(proxied.model).seconds.observe((now - proxied.received) / SECOND)
        if self.access_log is not None:
            self.access_log.add(_line(proxied, outcome, now))

    def _count_turn(self, proxied: RequestRecord, finished: bool, now: int) -> None:
        turn = EndedTurn(
            session=proxied.session,
            tenant=proxied.tenant,
            has_key=bool(proxied.key),
            finished=finished,
            prompt=proxied.prompt if finished else 0,
            cached=proxied.cached or 0,
            output=proxied.output,
            waited=max(0, (proxied.placed or now) - proxied.received),
            engine="" if proxied.engine is None else proxied.engine.name,
            engine_ns=now - proxied.placed if proxied.placed else 0,
        )
        self.sessions.ended(turn, now)


def _line(proxied: RequestRecord, outcome: str, now: int) -> AccessLine:
    def since(time_ns: int) -> float:
        return round((time_ns - proxied.received) / MS, 3) if time_ns else 0.0

    return AccessLine(
        time=proxied.received / SECOND,
        id=proxied.id,
        path=proxied.path,
        key=proxied.key,
        model=proxied.model,
        status=proxied.status,
        outcome=outcome,
        engine="" if proxied.engine is None else proxied.engine.name,
        why=proxied.why,
        tries=proxied.tries,
        bytes_in=proxied.size,
        prompt_tokens=proxied.prompt,
        cached_tokens=proxied.cached,
        output_tokens=proxied.output,
        waited_ms=0.0 if proxied.wait is None else round(proxied.wait.waited_ms, 3),
        waited_because="" if proxied.wait is None else proxied.wait.why,
        placed_ms=since(proxied.placed),
        first_byte_ms=since(proxied.first),
        total_ms=since(now),
    )
