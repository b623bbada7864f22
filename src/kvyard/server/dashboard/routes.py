"""The dashboard's routes: the page and its files, which are the same for every fleet, and the view, which asks for the token.

A browser can't put a token into the address bar's request, so the page itself is open. It asks for the token where the server
wants one, keeps it until the tab closes, and sends it as every client does.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

import kvyard.replay.report
from kvyard.events.tier import Tier
from kvyard.server.dashboard.feed import ViewFeed
from kvyard.server.dashboard.view import ViewSource
from kvyard.server.http import JSON, GuardCheck, Refusal, check_token, picked, while_connected

SLOW = 10.0
"""Seconds that a viewer may take to accept a frame."""
_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript"}
_FILES = {one.name: one for one in Path(__file__).with_name("assets").iterdir() if one.suffix in _TYPES}
_FILES |= {name: Path(kvyard.replay.report.__file__).with_name(name) for name in ("palette.css", "scales.js")}
_TIERS = [{"name": tier.name, **picked(tier.entry, "label place color")} for tier in Tier]
_MADE = {"tiers.js": b"export const TIERS = " + msgspec.json.encode(_TIERS) + b";\n"}
"""Files that follow from lists of ours."""
ASSETS = {name: _TYPES[Path(name).suffix] for name in (*_FILES, *_MADE) if name != "page.html"}
"""What the page loads."""
GUARDS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""On everything: names of workers and models are other people's words, and must stay words."""


class Dashboard:
    """One dashboard, which several applications of one event loop may serve."""

    def __init__(
        self,
        source: ViewSource,
        token: str | None = None,
        cut: Callable[[Any], None] | None = None,
        *,
        closed: str = "",
        guard: GuardCheck | None = None,
        look: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """``closed`` says why nothing is shown to any viewer; ``guard`` is asked about each. ``cut`` resets the connection that
        an ASGI scope came over: without it, a viewer that reads nothing is let go of politely, and its connection stays until
        it reads or leaves. ``look`` is as for ``ViewFeed``.
        """
        self.feed = ViewFeed(source, look)
        self.slow = SLOW
        self._token = token
        self._closed = closed
        self._guard = guard
        self._cut = cut
        self._files = {name: one.read_bytes() for name, one in _FILES.items()} | _MADE

    def routes(self) -> list[Any]:
        """``/dashboard`` and what belongs to it; ``/`` leads there."""
        from starlette.responses import RedirectResponse, Response
        from starlette.routing import Route

        def guarded(endpoint: Callable[[Any], Any]) -> Callable[[Any], Any]:
            async def checked(request: Any) -> Any:
                try:
                    if self._guard is not None:
                        self._guard(request.method, request.headers, self._token is not None)
                    if self._closed:
                        raise Refusal(403, self._closed)
                    if self._token is not None:
                        check_token(request.headers.get("authorization", ""), self._token)
                    await self.feed.refresh()
                    return endpoint(request)
                except Refusal as refusal:
                    body = msgspec.json.encode(refusal.problem)
                    return Response(body, refusal.status, headers=GUARDS | refusal.headers, media_type=JSON)

            return checked

        async def page(request: Any) -> Response:
            return Response(self._files["page.html"], headers=GUARDS, media_type="text/html")

        async def asset(request: Any) -> Response:
            name = request.url.path.rpartition("/")[2]
            return Response(self._files[name], headers=GUARDS, media_type=ASSETS[name])

        def view(request: Any) -> Response:
            return Response(msgspec.json.encode(self.feed.source()), headers=GUARDS, media_type=JSON)

        def events(request: Any) -> Any:
            if request.method == "HEAD":
                return Response(headers=GUARDS, media_type="text/event-stream")
            if not self.feed.join():
                few = f"{self.feed.most_viewers} watch already"
                raise Refusal(503, few if not self.feed.closed else "the server is shutting down", Retry_After="5")
            return _watching(self.feed, self.slow, self._cut)

        async def home(request: Any) -> Response:
            return RedirectResponse("dashboard", 307, headers=GUARDS)

        endpoints = {
            "/dashboard": page,
            "/dashboard/view": guarded(view),
            "/dashboard/events": guarded(events),
            "/": home,
        }
        endpoints |= {f"/dashboard/{name}": asset for name in ASSETS}
        return [Route(path, endpoint, methods=["GET"]) for path, endpoint in endpoints.items()]


def _watching(feed: ViewFeed, slow: float, cut: Callable[[Any], None] | None) -> Any:
    """The answer that goes on until the viewer leaves, is too slow, or the feed ends."""
    from starlette.responses import Response

    class Watching(Response):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            try:
                await while_connected(receive, self._show(scope, send))
            finally:
                feed.leave()

        async def _show(self, scope: Any, send: Any) -> None:
            headers = [header for header in self.raw_headers if header[0] != b"content-length"]
            try:
                async with asyncio.timeout(slow):
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                seen, body = feed.number, feed.first()
                while body:
                    async with asyncio.timeout(slow):
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                    body = await feed.next(seen)
                    seen = feed.number
                async with asyncio.timeout(slow):
                    await send({"type": "http.response.body", "body": b"event: bye\ndata: {}\n\n"})
            except TimeoutError:
                if cut is not None:
                    cut(scope)

    headers = GUARDS | {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return Watching(b"", 200, headers=headers, media_type="text/event-stream")
