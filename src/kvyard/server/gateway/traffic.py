"""Traffic: what is noted of each request on its way, for routers, recordings, metrics and people who watch."""

from __future__ import annotations

import logging
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, cast

import msgspec

from kvyard.clock import SECOND, WallClock
from kvyard.errors import KvyardError
from kvyard.router import Decision
from kvyard.server.gateway.engine import Engine
from kvyard.server.gateway.pool import Place, Pool
from kvyard.server.gateway.tally import Tally
from kvyard.server.gateway.usage import Usage

if TYPE_CHECKING:
    from kvyard.server.gateway.exchange import Exchange
    from kvyard.server.gateway.measures import Measures
    from kvyard.server.gateway.recording import TrafficRecorder

log = logging.getLogger(__name__)

RECENT = 50
"""Decisions that are remembered for whoever looks."""
FIRSTS = 4096
"""First bytes that are remembered."""


class Counters(msgspec.Struct):
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


class Recent(msgspec.Struct, frozen=True):
    """A decision, for whoever looks."""

    number: int
    at: float
    """Seconds since 1970."""
    model: str
    pool: str
    decision: Decision


class Traffic:
    """All requests of one gateway."""

    def __init__(self, clock: WallClock, measures: Measures | None) -> None:
        self.counters = Counters()
        self.recent: deque[Recent] = deque(maxlen=RECENT)
        self.tally = Tally()
        self.firsts: deque[tuple[int, int]] = deque(maxlen=FIRSTS)
        """When answers began, and how long after their requests."""
        self.recorder: TrafficRecorder | None = None
        self._clock = clock
        self._measures = measures
        self._ids = count(1)
        self._prefix = f"{clock.now():x}"[-8:]
        self.held = 0
        """Bytes of the bodies of all requests that are under way."""
        self._active: set[str] = set()
        self._decisions = 0

    def name(self, given: str) -> str:
        """A request's name: the client's, where it is one and nobody has it."""
        if given and len(given) <= 128 and given.isascii() and given.isprintable() and given not in self._active:
            return given
        while (made := f"{self._prefix}-{next(self._ids)}") in self._active:
            pass  # a client has guessed it
        return made

    def began(self, pool: Pool, place: Place, size: int, several: bool) -> None:
        """A request of ``size`` bytes that can be routed is here. ``several``: there are other models too."""
        self.held += size
        self._active.add(cast(str, place.request.id))
        self.counters.under_way += 1
        if self.recorder is not None:
            self._record(self.recorder, pool, place, several)

    def placed(self, exchange: Exchange, engine: Engine, decision: Decision) -> None:
        """A request was given to an engine."""
        engine.requests += 1
        engine.prompt_tokens += decision.num_tokens
        engine.tally.add(decision, exchange.pool.block_size)
        if exchange.tries > 1:
            self.counters.retried += 1
        else:
            self.counters.prompt_tokens += decision.num_tokens
            self.tally.add(decision, exchange.pool.block_size)
        self._decisions += 1
        self.recent.append(
            Recent(self._decisions, self._clock.now() / SECOND, exchange.name, exchange.pool.model, decision)
        )
        if self._measures is not None:
            self._measures.placed(exchange, decision)

    def first_bytes(self, exchange: Exchange) -> None:
        """An engine's first bytes are here."""
        exchange.pool.first_token(exchange.place.request.id)
        self.firsts.append((exchange.first, exchange.first - exchange.received))
        if self._measures is not None:
            self._measures.first_bytes(exchange)

    def progressed(self, exchange: Exchange) -> None:
        """More of an answer is here."""
        exchange.pool.router.progressed(exchange.place.request.id, exchange.events, self._clock.now())

    def answered(self, exchange: Exchange, engine: Engine, decision: Decision, said: Usage) -> None:
        """An answer is whole."""
        output = said.output if said.output is not None else max(0, exchange.events - 1)
        exchange.output = output
        engine.output_tokens += output
        self.counters.output_tokens += output
        if said.cached is not None:
            engine.cached_tokens += said.cached
        if self._measures is not None:
            self._measures.answered(exchange, decision, said)

    def ended(self, exchange: Exchange, outcome: str) -> None:
        """A request is over."""
        counters = self.counters
        counters.under_way -= 1
        self.held -= len(exchange.content)
        setattr(counters, outcome, getattr(counters, outcome) + 1)
        self._active.discard(cast(str, exchange.place.request.id))
        if self.recorder is not None:
            self.recorder.ended(exchange.place.request.id, exchange.output)
        if self._measures is not None:
            self._measures.ended(exchange, outcome)

    def _record(self, recorder: TrafficRecorder, pool: Pool, place: Place, several: bool) -> None:
        request, size = place.request, pool.block_size
        try:
            recorder.arrived(
                request.id,
                request.keys,
                request.num_tokens,
                key_tokens=size,
                tail=place.tail,
                session=request.session,
                model=pool.model if several else None,
            )
        except KvyardError as error:
            log.warning("the recording ends: %s", error)
            recorder.close()
