"""Adapters: loaded into all engines of a model, and unloaded again, by vLLM's own routes.

Engines that are added later don't have them: each reports its models, and gets requests for these only.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.server.gateway.client import EngineClient
from kvyard.server.gateway.engine import Engine
from kvyard.server.gateway.failures import EngineFailed
from kvyard.server.gateway.members import Membership
from kvyard.server.http import JSON, Raw, Refusal
from kvyard.server.weight import LARGE

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"


class AdapterWish(msgspec.Struct, kw_only=True):
    """``POST /v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``; further fields go to engines as they are."""

    lora_name: str
    model: str | None = None
    """The base model whose engines are meant; may be left out if there is one."""


class AdapterChange(msgspec.Struct, kw_only=True):
    """An adapter was loaded or unloaded everywhere."""

    lora_name: str
    engines: list[str]


class AdapterRoutes(msgspec.Struct, eq=False):
    """Handlers of the adapter routes."""

    members: Membership
    client: EngineClient

    async def change(self, path: str, body: bytes, headers: Mapping[str, str]) -> Raw:
        """Pass a wish on to all engines of a model that are up. Raises ``Refusal``, with the worst of their statuses where not
        all do it, and says what became of it at each.
        """
        if len(body) >= LARGE:
            raise Refusal(413, f"the body is longer than {LARGE} bytes", fix="send lora_name and lora_path")
        try:
            wish = msgspec.json.decode(body, type=AdapterWish)
            sent = msgspec.json.decode(body, type=dict[str, Any])
        except DECODE_ERRORS as error:
            raise Refusal(
                400, f"the body can't be read: {str(error)[:200]}", fix="send lora_name and lora_path"
            ) from None
        sent.pop("model", None)
        _, pool, _ = self.members.find(wish.model)
        engines = [engine for engine in pool.engines.values() if engine.up]
        if not engines:
            raise Refusal(503, f"no engine of model {pool.model} is up", fix="try again later", Retry_After="1")
        content = msgspec.json.encode(sent)
        answers = await asyncio.gather(*(self._tell(engine, path, content) for engine in engines))
        worst = max(status for status, _ in answers)
        if worst != 200:
            answers_listed = "; ".join(
                f"{engine.name}: {why}" for engine, (_, why) in zip(engines, answers, strict=True)
            )
            raise Refusal(
                worst,
                answers_listed,
                fix="fix what the engines report, and retry: engines that succeeded refuse or repeat it",
            )
        change = AdapterChange(lora_name=wish.lora_name, engines=[engine.name for engine in engines])
        return Raw(msgspec.json.encode(change), JSON)

    async def _tell(self, engine: Engine, path: str, body: bytes) -> tuple[int, str]:
        try:
            status, answer = await self.client.post(engine.url, path, body)
            if status != 200:
                return status, answer.decode("utf-8", "replace")[:300]
            await self.members.look(engine)
        except EngineFailed as failed:
            return 502, failed.reason
        return 200, "done"
