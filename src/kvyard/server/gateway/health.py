"""How engines are, judged by looks at them and by requests that went there. It asks nobody itself; ``watch`` does."""

from __future__ import annotations

import logging

from kvyard.clock import Clock, from_seconds
from kvyard.server.gateway.config import GatewayConfig
from kvyard.server.gateway.engine import Engine

log = logging.getLogger(__name__)


class Health:
    """Decides who gets requests."""

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

    def unwell(self, engine: Engine, reason: str, *, gone: bool) -> None:
        """An engine doesn't answer as it should; ``gone``: nobody is there."""
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

    def failed(self, engine: Engine, reason: str, *, gone: bool) -> None:
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
