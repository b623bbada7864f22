"""A transient index: listens to engines for a moment, answers one question, and ends.

It is the index service without HTTP, and answers as a service that has just started.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from kvyard.clock import from_seconds, pause
from kvyard.errors import KvyardError
from kvyard.events.transport import State
from kvyard.server.http import Refusal
from kvyard.server.indexer import schemas
from kvyard.server.indexer.config import Config
from kvyard.server.indexer.routes import IndexerRoutes
from kvyard.server.indexer.service import Service

SETTLE = 0.3
"""Seconds that every stream has to be whole before that is believed to be all."""


async def ask(
    asked: dict[str, Any],
    endpoints: Sequence[tuple[str, str | None]],
    *,
    seconds: float,
    block_size: int,
    explain: bool = False,
) -> dict[str, Any]:
    """Listen for up to ``seconds``, or until every stream is whole, then answer ``asked``. Ctrl-C ends the wait early.

    Raises ``KvyardError`` for what isn't an endpoint or can't be asked.
    """
    tenant = asked.get("tenant_id", "default")
    subscriptions = [
        schemas.Register(
            instance_id=endpoint,
            endpoint=endpoint,
            replay_endpoint=replay,
            model_name=asked["model_name"],
            tenant_id=tenant,
        )
        for endpoint, replay in endpoints
    ]
    service = Service(Config(block_size=block_size, subscriptions=subscriptions))
    routes = IndexerRoutes(service)
    try:
        await service.start()
        with suppress(asyncio.CancelledError):  # Ctrl-C: with what was learnt so far
            await _listen(service, seconds)
        answers: dict[str, Any] = {"score": await routes.score(msgspec.convert(asked, schemas.ScoreRequest), {})}
        if explain:
            answers["explain"] = await routes.explain(msgspec.convert(asked, schemas.ExplainRequest), {})
    except Refusal as refusal:
        raise KvyardError(str(refusal)) from None
    finally:
        await service.stop()
    value: dict[str, Any] = msgspec.to_builtins(answers)
    return value


async def _listen(service: Service, seconds: float) -> None:
    clock = service.clock
    until = clock.now() + from_seconds(seconds)
    whole_since: int | None = None
    while clock.now() < until:
        listeners = [listener for model in service.models.values() for listener in model.listeners.values()]
        if all(listener.subscriber.state == State.FRESH for listener in listeners):
            whole_since = clock.now() if whole_since is None else whole_since
            if clock.now() - whole_since >= from_seconds(SETTLE):
                return
        else:
            whole_since = None
        await pause(0.02)
