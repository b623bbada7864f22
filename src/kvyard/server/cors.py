"""CORS: pages of other sites that may send requests to this server.

Listed pages pass the guard, which refuses other sites. Routes that change or show the fleet stay closed to them: a page is
not an operator.
"""

from collections.abc import Sequence

from kvyard.server.connection import RequestHandler
from kvyard.server.request import HttpRequest

ANY = "*"
CLOSED = (
    *("/admin", "/explain", "/dashboard", "/close_session"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
)
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
    """An application around another."""

    def __init__(self, app: RequestHandler, origins: Sequence[str]) -> None:
        """``origins`` are such as https://chat.example.org, or ``*`` for any."""
        self.app = app
        self.bounds = app.bounds
        self.held = app.held
        self._any = ANY in origins
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)

    async def __call__(self, request: HttpRequest) -> None:
        origin = request.get("origin")
        if origin is None or request.path.startswith(CLOSED) or not (self._any or origin.lower() in self._origins):
            await self.app(request)
            return
        allowed = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"origin")]
        if request.method == "OPTIONS":
            wanted = request.get("access-control-request-headers")
            allowed += [(b"access-control-allow-methods", METHODS), (b"access-control-max-age", AGE)]
            if wanted:
                allowed.append((b"access-control-allow-headers", wanted.encode("latin-1")))
            request.respond(204, allowed, b"")
            return
        request.more_headers = [*allowed, (b"access-control-expose-headers", _EXPOSED)]
        request.drop_headers(_SAID_BY_BROWSERS)
        await self.app(request)
