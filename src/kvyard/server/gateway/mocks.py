"""Mocks tell of their whole fleets, event streams included; no real engine does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvyard.errors import KvyardError
from kvyard.server.gateway.config import EngineConfig
from kvyard.server.mock.schemas import WorkerState


async def fleet_of(session: Any, url: str, headers: Mapping[str, str]) -> list[EngineConfig]:
    """The workers that a mock at ``url`` tells of. Raises ``KvyardError`` where it can't be asked."""
    import aiohttp

    try:
        async with session.get(
            f"{url.rstrip('/')}/admin/workers", headers=headers, timeout=aiohttp.ClientTimeout(total=10)
        ) as reply:
            content = await reply.read()
            if reply.status != 200:
                raise KvyardError(
                    f"{url} doesn't tell of its workers: it answered {reply.status}; give other engines with --engine"
                )
            states = msgspec.json.decode(content, type=list[WorkerState])
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        why = getattr(error, "strerror", None) or str(error) or "no answer within 10 s"
        raise KvyardError(f"{url} can't be asked for its workers: {why}; start the mock first") from None
    except msgspec.MsgspecError as error:
        raise KvyardError(f"{url} is no mock: {error}; give other engines with --engine") from None
    return [
        EngineConfig(
            url=state.url,
            name=state.name,
            events=[stream.endpoint for stream in state.streams] or None,
            replay=[stream.replay_endpoint for stream in state.streams if stream.replay_endpoint] or None,
            block_size=state.block_size,
            dp_size=max(1, len(state.streams)),
        )
        for state in states
    ]
