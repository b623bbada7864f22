"""A watch: looks at one engine from time to time, and at once where a request had trouble with it.

It asks /health, and now and then /v1/models, which says where the engine belongs and which adapters it has by now.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvyard.clock import pause
from kvyard.errors import KvyardError
from kvyard.openai import ListedModel
from kvyard.server.gateway.client import EngineClient, EngineFailed
from kvyard.server.gateway.config import GatewayConfig
from kvyard.server.gateway.engine import Engine, EngineHealth
from kvyard.server.http import Refusal

log = logging.getLogger(__name__)

LEAST = 0.02
"""Seconds between two looks, however much trouble there is."""
MODELS_EVERY = 5
"""Looks at a healthy engine between two questions for its models."""

Learn = Callable[[Engine, list[ListedModel]], Awaitable[None]]
"""Called with what an engine serves; raises ``KvyardError`` or ``Refusal`` where the engine can't be used."""


class Watch:
    """Looks after one engine until it is stopped."""

    def __init__(
        self, engine: Engine, client: EngineClient, health: EngineHealth, config: GatewayConfig, learn: Learn
    ) -> None:
        """Begins at once."""
        self._engine = engine
        self._client = client
        self._health = health
        self._config = config
        self._learn = learn
        self._looks = 0
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"watch {engine.name}")

    async def stop(self) -> None:
        """Look no more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        config, engine = self._config, self._engine
        while True:
            engine.look.clear()
            try:
                await self._look()
            except Exception:
                log.exception("looking at %s failed", engine.name)
            seconds = config.health_seconds if engine.state == "ready" else config.recovery_seconds
            await pause(LEAST)
            try:
                async with asyncio.timeout(seconds):
                    await engine.look.wait()
            except TimeoutError:
                pass

    async def _look(self) -> None:
        engine = self._engine
        try:
            status = await self._client.health(engine.url)
            if status != 200:
                raise EngineFailed(f"/health answered {status}")
            if engine.pool is None or not engine.models or not engine.up or self._looks % MODELS_EVERY == 0:
                await self._learn(engine, (await self._client.models(engine.url)).data)
        except EngineFailed as failed:
            self._health.unwell(engine, failed.reason, gone=failed.gone)
        except (KvyardError, Refusal) as error:
            self._health.unwell(engine, f"it can't be taken in: {error}"[:400])
        else:
            self._looks += 1
            if engine.pool is not None:
                self._health.well(engine)
