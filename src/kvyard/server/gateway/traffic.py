"""Traffic: what is noted of each request on its way, for metrics, recordings and people who watch. It changes no route."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from itertools import count

import msgspec

from kvyard.clock import SECOND, WallClock
from kvyard.errors import KvyardError
from kvyard.router import Decision, RouteRequest
from kvyard.server.dashboard.latency import LatencyWindow
from kvyard.server.dashboard.view import MOST_DECISIONS
from kvyard.server.gateway.engine import Engine, PromptTally
from kvyard.server.gateway.metrics import GatewayMetrics
from kvyard.server.gateway.proxied import AnswerTokens, ProxiedRequest
from kvyard.server.gateway.recording import TrafficRecorder

log = logging.getLogger(__name__)


class TrafficCounters(msgspec.Struct):
    """What became of requests, over all time."""

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


class Traffic:
    """All requests of one gateway."""

    def __init__(self, clock: WallClock, metrics: GatewayMetrics) -> None:
        self.counters = TrafficCounters()
        self.recent: deque[RecentDecision] = deque(maxlen=MOST_DECISIONS)
        self.tally = PromptTally()
        self.first_bytes = LatencyWindow()
        self.recorder: TrafficRecorder | None = None
        self.held = 0
        """Bytes of the bodies of all requests that are under way."""
        self._clock = clock
        self._metrics = metrics
        self._ids = count(1)
        self._prefix = f"{clock.now():x}"[-8:]
        self._active: set[str] = set()
        self._decisions = 0

    def name(self, given: str) -> str:
        """A request's id: the client's, where it is a proper one and not in use."""
        if given and len(given) <= 128 and given.isascii() and given.isprintable() and given not in self._active:
            return given
        while (made := f"{self._prefix}-{next(self._ids)}") in self._active:
            pass  # a client has guessed it
        return made

    def refused(self) -> None:
        """A request couldn't be routed."""
        self.counters.refused += 1
        self._metrics.refused()

    def began(
        self, proxied: ProxiedRequest, request: RouteRequest, tail: Sequence[int] | None, model: str | None
    ) -> None:
        """A request that can be routed is here. ``tail`` are the tokens behind its last full block; ``model`` is given where
        there are several.
        """
        self.held += proxied.size
        self._active.add(proxied.id)
        self.counters.under_way += 1
        if self.recorder is None:
            return
        try:
            self.recorder.arrived(
                proxied.id,
                request.keys,
                request.num_tokens,
                key_tokens=proxied.block_size,
                tail=tail,
                session=request.session,
                model=model,
            )
        except KvyardError as error:
            log.warning("the recording ends: %s", error)
            self.recorder.close()

    def placed(self, proxied: ProxiedRequest, engine: Engine, decision: Decision) -> None:
        """A request was given to an engine."""
        engine.requests += 1
        engine.prompt_tokens += decision.num_tokens
        engine.tally.add(decision, proxied.block_size)
        if proxied.tries > 1:
            self.counters.retried += 1
        else:
            self.counters.prompt_tokens += decision.num_tokens
            self.tally.add(decision, proxied.block_size)
        self._decisions += 1
        now = self._clock.now()
        self.recent.append(RecentDecision(self._decisions, now / SECOND, proxied.model, proxied.pool, decision))
        self._metrics.placed(proxied, decision, now)

    def began_answer(self, proxied: ProxiedRequest) -> None:
        """An engine's first bytes are here."""
        proxied.first = self._clock.now()
        self.first_bytes.add(proxied.first, proxied.first - proxied.received)
        self._metrics.began_answer(proxied)

    def answered(self, proxied: ProxiedRequest, engine: Engine, decision: Decision, said: AnswerTokens) -> None:
        """An answer is whole."""
        proxied.output = said.output if said.output is not None else max(0, proxied.events - 1)
        engine.output_tokens += proxied.output
        self.counters.output_tokens += proxied.output
        if said.cached is not None:
            engine.cached_tokens += said.cached
        self._metrics.answered(proxied, decision, said)

    def ended(self, proxied: ProxiedRequest, outcome: str) -> None:
        """A request is over."""
        counters = self.counters
        counters.under_way -= 1
        self.held -= proxied.size
        setattr(counters, outcome, getattr(counters, outcome) + 1)
        self._active.discard(proxied.id)
        if self.recorder is not None:
            self.recorder.ended(proxied.id, proxied.output)
        self._metrics.ended(proxied, outcome, self._clock.now())
