"""A proxied request from its admission to its end, however it came: a chat, another route, or the picker.

All accounts are kept here: traffic, the engine's booking, the key's quota, the trace, the connection to the engine. ``end``
settles what is open, once.
"""

from collections.abc import Callable
from typing import Any

from kvyard.clock import Clock
from kvyard.server.gateway.access import RateAdmission
from kvyard.server.gateway.connections import EngineConnection
from kvyard.server.gateway.engine import Engine
from kvyard.server.gateway.pool import EngineRequest, Placed
from kvyard.server.gateway.tracing import RequestTrace
from kvyard.server.gateway.traffic import GatewayTraffic, RequestRecord
from kvyard.server.gateway.usage import AnswerTokens
from kvyard.server.request import HttpRequest


class ProxiedRequest(RequestRecord, kw_only=True, eq=False):
    """One request, with everything that must be settled at its end."""

    place: EngineRequest
    traffic: GatewayTraffic
    clock: Clock
    ticket: RateAdmission | None = None
    """Its draw on a quota, if there are limits."""
    trace: RequestTrace | None = None
    booked: Placed | None = None
    """The engine that has it, until that is released."""
    connection: EngineConnection | None = None
    """The connection to that engine, until its answer was read."""
    computed: bool = True
    """True if the engine that has it may have computed the prompt."""
    sent: int = 0
    """Time at which that engine received the request, if that is traced."""
    explained: bool = True
    """True if its client may learn how it was routed."""
    prefill_tried: bool = False
    """True if a prefill engine was asked for it."""
    outcome: str = ""
    """Outcome, once known."""
    at_end: Callable[[], None] | None = None
    """Called at its end, for what else it has taken."""
    over: bool = False
    at_engine: bool = False
    """True while flow control counts it as at an engine."""

    async def book(self) -> Placed:
        """Wait for an engine. Raises ``Exhausted``, and ``Refusal`` if there is none."""
        if self.trace is not None:
            self.trace.queued(self.clock.now())
        placed = await self.pool.place(self.place)
        self.take(placed)
        return placed

    def take(self, placed: Placed) -> None:
        """Note the engine that was booked for it."""
        self.booked, self.computed, self.at_engine = placed, True, True
        self.wait = self.place.wait
        self.tries += 1
        decision, engine = placed
        self.traffic.placed(self, engine, decision)

    def first_token(self, seen: bool) -> None:
        """Note the first bytes of the answer; ``seen`` if they are its first token and not a whole answer."""
        if self.computed and self.booked is not None:
            self.pool.first_token(self.id, seen=seen)
        self.traffic.began_answer(self)

    def answered(self, usage: AnswerTokens) -> None:
        """Note that the answer is complete, with these token counts."""
        if self.booked is not None:
            decision, engine = self.booked
            self.traffic.answered(self, engine, decision, usage)
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.release()
        self.release()

    def failed(self, reason: str, engine: Engine) -> None:
        """Note that its engine failed: the request may be sent to another one."""
        self.computed = False
        self.place.tried.add(engine.name)
        if self.trace is not None:
            self.trace.part("failed", self.placed, self.clock.now(), reason, engine=engine.name)
        if self.at_engine:
            self.at_engine = False
            self.pool.take_back(self.place)
        self.release()

    def release(self) -> None:
        """Give the engine's booking back, and end its work if it isn't done."""
        connection, self.connection = self.connection, None
        if connection is not None:
            # A connection whose answer wasn't read to its end can't be used again: closing it ends the engine's work.
            connection.close()
        booked, self.booked = self.booked, None
        if booked is not None:
            self.pool.release(booked[1], self.place.request.id, refused=not self.computed)

    def end_with(self, request: HttpRequest) -> None:
        """End it with the client's ``request``, which has ended."""
        outcome = self.outcome
        if not outcome and request.gone:
            outcome = "cancelled"
        elif not outcome and request.ending:
            # The server couldn't wait: it has refused, or had begun to answer.
            outcome, self.status = ("refused", 503) if request.finished else ("broken", self.status)
        self.end(outcome or "failed")

    def end(self, outcome: str) -> None:
        """Settle everything. Calls after the first do nothing."""
        if self.over:
            return
        self.over, self.outcome = True, outcome
        more, self.at_end = self.at_end, None
        if more is not None:
            more()
        self.release()
        if self.ticket is not None:
            used = (self.prompt or self.ticket.taken) + (self.output or self.events)
            had = self.tries or self.prefill_tried
            self.ticket.settle(used if had else 0)  # no engine had it: its tokens are given back
        if self.at_engine:
            self.pool.ended(self.place, max(0, self.prompt - (self.cached or 0)), self.output or self.events)
        if self.trace is not None:
            self._end_trace(self.trace)
        self.traffic.ended(self, self.outcome)

    def _end_trace(self, trace: RequestTrace) -> None:
        now = self.clock.now()
        if self.first:
            trace.part("first byte", self.sent or self.placed, self.first)
            trace.part("stream" if self.events else "answer", self.first, now)
        attributes: dict[str, Any] = {
            "gen_ai.request.model": self.model,
            "gen_ai.usage.input_tokens": self.prompt,
            "gen_ai.usage.output_tokens": self.output,
            "kvyard.request_id": self.id,
            "kvyard.tries": self.tries,
        }
        if self.cached is not None:
            attributes["gen_ai.usage.cache_read.input_tokens"] = self.cached
        if self.engine is not None:
            attributes["kvyard.engine"] = self.engine.name
        trace.end(now, self.status, self.outcome, attributes)
