"""Engines as the gateway sees them, and the judgement of how they are. Nothing is sent from here; ``watch`` asks them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Literal, Protocol

from kvyard.clock import Clock, from_seconds
from kvyard.events.types import Tier
from kvyard.index import Holder
from kvyard.router import Decision
from kvyard.server.dashboard.view import PromptSources, prompt_sources
from kvyard.server.gateway.config import GatewayConfig, GatewayEngine, check_url

log = logging.getLogger(__name__)

EngineState = Literal["starting", "ready", "suspect", "down"]


class PromptTally:
    """Where the tokens of routed prompts were, as decisions saw it, over all time."""

    __slots__ = ("computed", "elsewhere", "tiers")

    def __init__(self) -> None:
        self.tiers = [0] * len(Tier)
        self.elsewhere = self.computed = 0

    def add(self, decision: Decision, block_size: int) -> None:
        """Count one decision."""
        known = decision.overlap * block_size
        elsewhere = decision.regret * block_size
        for at, blocks in enumerate(decision.tiers):
            self.tiers[at] += blocks * block_size
        self.elsewhere += elsewhere
        self.computed += max(0, decision.num_tokens - known - elsewhere)

    def prompts(self) -> PromptSources:
        """As a dashboard has it."""
        return prompt_sources(self.tiers, self.computed, self.elsewhere)


class EngineGroup(Protocol):
    """What an engine's state changes in the pool that it is in."""

    model: str

    def open(self, engine: Engine) -> None:
        """Send it requests from now on."""

    def shut(self, engine: Engine) -> None:
        """Send it no more; what it has under way goes on and counts."""

    def forget(self, engine: Engine) -> None:
        """Send it no more, and forget what was sent: its process is gone, and its cache with it."""

    def spare(self, engine: Engine) -> bool:
        """Whether others can take requests without this engine."""


class Engine:
    """One upstream. Changed only on the gateway's loop."""

    def __init__(self, config: GatewayEngine) -> None:
        """Raises ``KvyardError`` for a URL that isn't one."""
        self.config = config
        self.name = config.called
        self.url = check_url(config.url, "an engine's url")
        self.addresses: dict[str, Any] = {}
        """By path, its URL as the client library wants it: parsing one costs more than finding it."""
        self.holders = [Holder(self.name, rank) for rank in range(config.dp_size)]
        self.state: EngineState = "starting"
        self.reason = "nothing heard yet"
        self.draining = False
        self.pool: EngineGroup | None = None
        self.models: dict[str, str | None] = {}
        """Names that it answers to, with the base model of those that are adapters."""
        self.in_flight = 0
        self.misses = 0
        """Looks in a row that failed."""
        self.strikes = 0
        """Requests in a row that it failed and others answered."""
        self.shunned_until = 0
        self.look = asyncio.Event()
        """Set to have it looked at soon."""
        self.heard_for: str | None = None
        """The model for which its events are listened to."""
        self.streams_error = ""
        """Why its events aren't listened to, where they should be."""
        self.requests = 0
        self.failed = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.downs = 0
        self.tally = PromptTally()

    @property
    def model(self) -> str:
        """The model of its pool; empty where it is in none."""
        return "" if self.pool is None else self.pool.model

    @property
    def up(self) -> bool:
        """Whether it may get requests, drained or not."""
        return self.state in ("ready", "suspect")

    def serves(self, name: str) -> bool:
        """Whether it answers to this name. One whose list isn't known yet serves the model it was configured with."""
        return name in self.models if self.models else name == self.config.model


class EngineHealth:
    """Decides which engines get requests, by looks at them and by requests that went there."""

    def __init__(self, config: GatewayConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock

    def well(self, engine: Engine) -> None:
        """An engine answers: it gets requests from now on, unless it drains."""
        if self._clock.now() < engine.shunned_until:
            return
        was_up = engine.up
        engine.misses = 0
        if not was_up:
            engine.strikes = 0
        engine.reason = ""
        engine.state = "ready"
        if engine.pool is not None and not was_up and not engine.draining:
            engine.pool.open(engine)

    def unwell(self, engine: Engine, reason: str, *, gone: bool = False) -> None:
        """An engine doesn't answer as it should; ``gone``: there is no process any more."""
        engine.misses += 1
        engine.reason = reason
        if gone or engine.misses >= self._config.unhealthy_after:
            if engine.state != "down":
                engine.downs += 1
                log.warning("%s is down: %s", engine.name, reason)
            engine.state = "down"
            if engine.pool is not None:
                if gone:
                    engine.pool.forget(engine)
                else:
                    engine.pool.shut(engine)
        elif engine.state == "ready":
            engine.state = "suspect"

    def failed(self, engine: Engine, reason: str, *, gone: bool = False) -> None:
        """A request found an engine failing."""
        engine.failed += 1
        if engine.pool is None:
            return  # it was removed meanwhile
        if gone:
            self.unwell(engine, reason, gone=True)
        elif engine.state == "ready":
            engine.state, engine.reason = "suspect", reason
        engine.look.set()

    def served(self, engine: Engine, others: list[Engine]) -> None:
        """An engine answered a request that ``others`` had failed: so it wasn't the request's fault."""
        engine.strikes = 0
        for other in others:
            other.strikes += 1
            pool = other.pool
            if other.strikes >= self._config.unhealthy_after and pool is not None and other.up and pool.spare(other):
                log.warning("%s gets no requests for %g s: %s", other.name, self._config.shun_seconds, other.reason)
                other.strikes = 0
                other.shunned_until = self._clock.now() + from_seconds(self._config.shun_seconds)
                other.state, other.reason = "down", "it failed requests that others answered"
                other.downs += 1
                pool.shut(other)
