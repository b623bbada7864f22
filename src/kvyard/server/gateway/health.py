"""State of engines: decided by looks at each, from time to time or at once where a request had trouble, and by requests.

A look asks /health, and now and then /v1/models, which has the engine's model and its current adapters, and /is_sleeping.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Literal
from zlib import crc32

import msgspec

from kvyard.clock import Clock, from_seconds, pause
from kvyard.errors import KvyardError
from kvyard.openai import ListedModel
from kvyard.server.gateway.client import EngineClient
from kvyard.server.gateway.config import GatewayConfig
from kvyard.server.gateway.engine import Engine
from kvyard.server.gateway.failures import EngineFailed
from kvyard.server.http import Refusal

log = logging.getLogger(__name__)

LEAST = 0.02
"""Seconds between two looks, however much trouble there is."""
MODELS_EVERY = 5
"""Looks at a healthy engine between two questions for its models and its sleep."""
SLEEPS = "it sleeps, so its cache is gone"

Finding = Literal["gone", "struck", "answered"]
"""Findings of requests: there is no process any more; it failed what another engine answered; it answered after that."""
Learn = Callable[[Engine, list[ListedModel]], Awaitable[None]]
"""Called with what an engine serves; raises ``KvyardError`` or ``Refusal`` where the engine can't be used."""


class EngineHealth(msgspec.Struct, eq=False):
    """Decides which engines get requests, by looks at them and by requests that went there."""

    config: GatewayConfig
    clock: Clock
    tell: Callable[[Finding, str, str], None] | None = None
    """Called with requests' findings about an engine, its name and a reason, for other processes."""

    def well(self, engine: Engine) -> None:
        """Mark an engine as up: it gets requests from now on, unless it drains."""
        if self.clock.now() < engine.shunned_until:
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
        """Mark an engine as unhealthy; ``gone``: its process doesn't exist any more."""
        engine.misses += 1
        engine.reason = reason
        if gone or engine.misses >= self.config.unhealthy_after:
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
        """Note that an engine failed during a request."""
        engine.failed += 1
        if engine.pool is None:
            return  # it was removed meanwhile
        if gone:
            self.unwell(engine, reason, gone=True)
            self._found("gone", engine)
        elif engine.state == "ready":
            engine.state, engine.reason = "suspect", reason
        engine.look.set()

    def served(self, engine: Engine, others: list[Engine]) -> None:
        """Note that an engine answered a request that ``others`` had failed: so the request wasn't the cause."""
        if engine.strikes:
            engine.strikes = 0
            self._found("answered", engine)
        for other in others:
            self._struck(other)
            self._found("struck", other)

    def heard(self, finding: Finding, engine: Engine, reason: str) -> None:
        """Receive another process's finding about an engine."""
        if engine.pool is None:
            return
        if finding == "answered":
            engine.strikes = 0
        elif finding == "struck":
            self._struck(engine)
        elif engine.up:
            self.unwell(engine, reason, gone=True)
            engine.look.set()

    def _found(self, finding: Finding, engine: Engine) -> None:
        if self.tell is not None:
            self.tell(finding, engine.name, engine.reason)

    def _struck(self, engine: Engine) -> None:
        """Count a failure of a request that another engine answered; with too many in a row the engine gets none for a
        while."""
        engine.strikes += 1
        pool = engine.pool
        if engine.strikes >= self.config.unhealthy_after and pool is not None and engine.up and pool.spare(engine):
            last = f", the last because {engine.reason}" if engine.reason else ""
            engine.state, engine.reason = "down", f"it failed requests that others answered{last}"
            log.warning("%s gets no requests for %g s: %s", engine.name, self.config.shun_seconds, engine.reason)
            engine.strikes = 0
            engine.shunned_until = self.clock.now() + from_seconds(self.config.shun_seconds)
            engine.downs += 1
            pool.shut(engine)

    async def watch(self, engine: Engine, client: EngineClient, learn: Learn) -> None:
        """Look after an engine until cancelled."""
        looks = 0
        # Engines are mostly taken in together. Looked at together ever after, hundreds of them would hold requests up.
        share = crc32(engine.name.encode("utf-8", "surrogatepass")) / 2**32
        while True:
            engine.look.clear()
            try:
                if await self._look(engine, client, learn, looks % MODELS_EVERY == 0):
                    looks += 1
            except Exception:
                log.exception("looking at %s failed", engine.name)
            await pause(LEAST)
            config = self.config
            seconds = config.health_seconds if engine.state == "ready" else config.recovery_seconds
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds * share):
                    await engine.look.wait()
            share = 1.0

    def doubt(self, engine: Engine) -> None:
        """Check the models of ``engine`` before it gets a request: another process may be at its address."""
        if engine.doubt is None:
            engine.doubt = asyncio.get_running_loop().create_future()
        engine.look.set()

    async def _look(self, engine: Engine, client: EngineClient, learn: Learn, ask_models: bool) -> bool:
        """Returns whether the engine answered as it should."""
        doubt = engine.doubt
        try:
            return await self._ask(engine, client, learn, ask_models or doubt is not None or engine.state != "ready")
        finally:
            if doubt is not None:
                engine.settle()

    async def _sleeps(self, engine: Engine, client: EngineClient) -> bool:
        """Return true if an engine sleeps. The index then credits none of its blocks until its stream clears them."""
        asleep = await client.asleep(engine.address)
        engine.tells_sleep = asleep is not None
        if asleep and engine.reason != SLEEPS:
            engine.distrust(SLEEPS)
        return bool(asleep)

    async def _ask(self, engine: Engine, client: EngineClient, learn: Learn, ask_models: bool) -> bool:
        try:
            status = await client.health(engine.address)
            if status != 200:
                raise EngineFailed(f"/health answered {status}")
            may_tell = engine.tells_sleep or engine.state != "ready"
            if ask_models and may_tell and await self._sleeps(engine, client):
                raise EngineFailed(SLEEPS, gone=True)
            if engine.pool is None or not engine.models or ask_models:
                await learn(engine, (await client.models(engine.address)).data)
        except EngineFailed as failed:
            self.unwell(engine, failed.reason, gone=failed.gone)
        except (KvyardError, Refusal) as error:
            self.unwell(engine, f"it can't be applied: {error}"[:400])
        else:
            if engine.pool is not None:
                self.well(engine)
            return True
        return False
