"""A watch: looks at one engine from time to time, and at once where somebody had trouble with it.

It asks /health, and now and then /v1/models, which says where the engine belongs and which adapters it has by now.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from kvyard.clock import pause
from kvyard.errors import KvyardError
from kvyard.openai import ListedModels
from kvyard.server.gateway.engine import Engine
from kvyard.server.http import Refusal

if TYPE_CHECKING:
    from kvyard.server.gateway.gateway import Gateway

log = logging.getLogger(__name__)

LEAST = 0.02
"""Seconds between two looks, however much trouble there is."""
MODELS_EVERY = 5
"""Looks at a healthy engine between two questions for its models."""


class Watch:
    """Looks after one engine until it is stopped."""

    def __init__(self, gateway: Gateway, engine: Engine) -> None:
        """Begins at once."""
        self._gateway = gateway
        self._engine = engine
        self._looks = 0
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"watch {engine.name}")

    async def stop(self) -> None:
        """Look no more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        config, engine = self._gateway.config, self._engine
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
        import aiohttp

        gateway, engine = self._gateway, self._engine
        timeout = aiohttp.ClientTimeout(total=gateway.config.health_timeout)
        try:
            async with gateway.session.get(
                f"{engine.url}/health", headers=gateway.authorized, timeout=timeout, allow_redirects=False
            ) as reply:
                await reply.read()
                if reply.status != 200:
                    gateway.health.unwell(engine, f"/health answered {reply.status}", gone=False)
                    return
            if engine.pool is None or not engine.models or not engine.up or self._looks % MODELS_EVERY == 0:
                async with gateway.session.get(
                    f"{engine.url}/v1/models", headers=gateway.authorized, timeout=timeout, allow_redirects=False
                ) as reply:
                    content = await reply.read()
                    if reply.status != 200:
                        gateway.health.unwell(engine, f"/v1/models answered {reply.status}", gone=False)
                        return
                await self._learn(msgspec.json.decode(content, type=ListedModels))
        except aiohttp.ClientConnectorError as error:
            from kvyard.server.gateway.failures import OURS

            said = f"it can't be reached: {error.os_error.strerror or error.os_error}"
            gateway.health.unwell(engine, said, gone=error.errno not in OURS)
            return
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            said = "it didn't answer in time" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
            gateway.health.unwell(engine, said[:200], gone=False)
            return
        except msgspec.MsgspecError:
            gateway.health.unwell(engine, "/v1/models can't be read", gone=False)
            return
        except (KvyardError, Refusal) as error:
            gateway.health.unwell(engine, f"it can't be taken in: {error}"[:400], gone=False)
            return
        self._looks += 1
        if engine.pool is not None:
            gateway.health.well(engine)

    async def _learn(self, said: ListedModels) -> None:
        """Which names it answers to; with the first time, which pool it belongs to."""
        gateway, engine = self._gateway, self._engine
        models = {one.id: one.parent for one in said.data}
        if engine.pool is not None and engine.config.model is None and engine.pool.model not in models:
            log.warning("%s doesn't serve %s any more", engine.name, engine.pool.model)
            await gateway.leave(engine)
        if engine.pool is None:
            base = next((one.id for one in said.data if one.parent is None), None)
            if base is None:
                engine.reason = "it serves no model"
                return
            await gateway.join(engine, base, lenient=True)
        if models != engine.models:
            if engine.config.model is not None and engine.config.model not in models:
                log.warning(
                    "%s serves %s, not %s as it was given", engine.name, ", ".join(models)[:200], engine.config.model
                )
            engine.models = models
            gateway.names_changed()
