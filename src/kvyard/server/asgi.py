"""What ASGI applications of our own do on a client's connection."""

from __future__ import annotations

from typing import Any

from kvyard.clock import pause


async def until_disconnect(receive: Any) -> None:
    """Wait until the client hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_response(send: Any, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    """Answer with a body that is complete."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def close_connection(scope: Any) -> None:
    """End the client's connection without its answer's proper end."""
    transport = scope.get("kvyard.transport")
    if transport is not None:
        transport.close()
        await pause()
