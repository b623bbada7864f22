"""CORS: which pages of other sites may ask this server, by the browser's leave.

A page that is listed is let past the guard, which knows it only as another site's. What changes or shows the fleet is never let
through, whatever is listed: a page is not an operator.
"""

from collections.abc import Sequence
from typing import Any

ANY = "*"
CLOSED = ("/admin", "/explain", "/dashboard")
"""Beginnings of paths that no page of another site may ask."""
METHODS = b"GET, POST, OPTIONS"
AGE = b"600"
"""Seconds for which a browser needn't ask again."""
_EXPOSED = b"x-kvyard-decision, x-request-id, retry-after, " + b", ".join(
    b"x-ratelimit-%b-%b" % (what, kind)
    for kind in (b"requests", b"tokens")
    for what in (b"limit", b"remaining", b"reset")
)
_SAID_BY_BROWSERS = (b"origin", b"sec-fetch-site")


class Cors:
    """An ASGI application around another."""

    def __init__(self, app: Any, origins: Sequence[str]) -> None:
        """``origins`` are such as https://chat.example.org, or ``*`` for any."""
        self.app = app
        self._any = ANY in origins
        self._origins = frozenset(origin.rstrip("/").lower().encode() for origin in origins)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        origin = None
        if scope["type"] == "http":
            origin = next((value for name, value in scope["headers"] if name == b"origin"), None)
        if origin is None or scope["path"].startswith(CLOSED) or not (self._any or origin.lower() in self._origins):
            await self.app(scope, receive, send)
            return
        allowed = [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        if scope["method"] == "OPTIONS":
            wanted = next((value for name, value in scope["headers"] if name == b"access-control-request-headers"), b"")
            allowed += [(b"access-control-allow-methods", METHODS), (b"access-control-max-age", AGE)]
            if wanted:
                allowed.append((b"access-control-allow-headers", wanted))
            await send({"type": "http.response.start", "status": 204, "headers": allowed})
            await send({"type": "http.response.body", "body": b""})
            return
        allowed.append((b"access-control-expose-headers", _EXPOSED))

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *allowed]}
            await send(message)

        # In place: what the protocol writes into this scope later has to reach the application.
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in _SAID_BY_BROWSERS]
        await self.app(scope, receive, sending)
