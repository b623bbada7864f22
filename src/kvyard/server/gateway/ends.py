"""The two ends of an exchange: small deeds on a client's connection and on an engine's. They decide nothing."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec

from kvyard.clock import pause
from kvyard.server.http import JSON, Refusal, openai_error


async def until_gone(receive: Any) -> None:
    """Wait until the client hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def end(scope: Any) -> None:
    """End the client's connection without its answer's proper end."""
    transport = scope.get("kvyard.transport")
    if transport is not None:
        transport.close()
        await pause()


async def say(send: Any, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    """Answer the client with all that there is to say."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Any, refusal: Refusal) -> int:
    """Answer the client with a refusal, in OpenAI's words. Returns the status."""
    status, problem = openai_error(refusal)
    more = [(name.lower().encode(), value.encode()) for name, value in refusal.headers.items()]
    await say(send, status, [(b"content-type", JSON.encode()), *more], msgspec.json.encode(problem))
    return status


async def read_up_to(response: aiohttp.ClientResponse, most: int) -> bytes:
    """An engine's answer, or its first ``most`` bytes and a little more."""
    parts: list[bytes] = []
    size = 0
    while size < most:
        part = await response.content.readany()
        if not part:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts)
