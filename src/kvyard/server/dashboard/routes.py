"""The dashboard's routes: the page and its files, which are the same for every fleet, and the view, which asks for the token.

A browser can't put a token into the address bar's request, so the page itself is open. It asks for the token where the server
wants one, keeps it until the tab closes, and sends it as every client does.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

import kvyard.replay.report
from kvyard.events.tier import Tier
from kvyard.server.dashboard.feed import ViewFeed
from kvyard.server.dashboard.view import ViewSource
from kvyard.server.http import JSON, GuardCheck, Operation, Refusal, Response, check_token, get, header_pairs, picked
from kvyard.server.request import HttpRequest

SLOW = 10.0
"""Seconds that a viewer may take to accept a frame."""
_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript"}
_FILES = {one.name: one for one in Path(__file__).with_name("assets").iterdir() if one.suffix in _TYPES}
_FILES |= {name: Path(kvyard.replay.report.__file__).with_name(name) for name in ("palette.css", "scales.js")}
_TIERS = [{"name": tier.name, **picked(tier.entry, "label place color")} for tier in Tier]
_MADE = {"tiers.js": b"export const TIERS = " + msgspec.json.encode(_TIERS) + b";\n"}
"""Files that follow from lists of ours."""
ASSETS = {name: _TYPES[Path(name).suffix] for name in (*_FILES, *_MADE) if name != "page.html"}
"""Files that the page loads."""
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
_GUARDS = header_pairs(GUARDS)


class Dashboard:
    """One dashboard, which several applications of one event loop may serve."""

    def __init__(
        self,
        source: ViewSource,
        token: str | None = None,
        *,
        closed: str = "",
        guard: GuardCheck | None = None,
        look: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """``closed`` says why no viewer sees anything; ``guard`` is asked about each. ``look`` is as for ``ViewFeed``."""
        self.feed = ViewFeed(source, look)
        self.slow = SLOW
        self._token = token
        self._closed = closed
        self._guard = guard
        self._files = {name: path.read_bytes() for name, path in _FILES.items()} | _MADE

    def operations(self) -> list[Operation]:
        """``/dashboard`` and what belongs to it; ``/`` leads there."""
        plain = {"/dashboard": self._page, "/": self._home} | {f"/dashboard/{name}": self._asset for name in ASSETS}
        watched = {"/dashboard/view": self._view, "/dashboard/events": self._events}
        return [get(path, handler, open=True) for path, handler in {**plain, **watched}.items()]

    async def _page(self, body: None, request: HttpRequest) -> Response:
        return _response(self._files["page.html"], "text/html")

    async def _asset(self, body: None, request: HttpRequest) -> Response:
        name = request.path.rpartition("/")[2]
        return _response(self._files[name], ASSETS[name])

    async def _home(self, body: None, request: HttpRequest) -> Response:
        return Response(307, [(b"location", b"dashboard"), *_GUARDS])

    async def _view(self, body: None, request: HttpRequest) -> Response:
        refused = await self._checked(request)
        return refused or _response(msgspec.json.encode(self.feed.source()), JSON)

    async def _events(self, body: None, request: HttpRequest) -> Response:
        refused = await self._checked(request)
        if refused is not None:
            return refused
        if request.method == "HEAD":
            return _response(b"", "text/event-stream")
        if not self.feed.join():
            few = f"{self.feed.most_viewers} watch already"
            why = few if not self.feed.closed else "the server is shutting down"
            return _refused(Refusal(503, why, Retry_After="5"))
        return WatchedFeed(self.feed, self.slow)

    async def _checked(self, request: HttpRequest) -> Response | None:
        """The refusal of a viewer who may not see the fleet."""
        try:
            if self._guard is not None:
                self._guard(request.method, request, self._token is not None)
            if self._closed:
                raise Refusal(403, self._closed)
            if self._token is not None:
                check_token(request.get("authorization", ""), self._token)
            await self.feed.refresh()
        except Refusal as refusal:
            return _refused(refusal)
        return None


def _response(body: bytes, kind: str) -> Response:
    named = f"{kind}; charset=utf-8" if kind.startswith("text/") else kind
    return Response(200, [(b"content-type", named.encode()), *_GUARDS], body)


def _refused(refusal: Refusal) -> Response:
    more = [(b"content-type", JSON.encode()), *header_pairs(refusal.headers)]
    return Response(refusal.status, [*_GUARDS, *more], msgspec.json.encode(refusal.problem))


class WatchedFeed(Response):
    """Goes on until the viewer leaves, is too slow, or the feed ends."""

    def __init__(self, feed: ViewFeed, slow: float) -> None:
        headers = header_pairs(GUARDS | {"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        super().__init__(200, [(b"content-type", b"text/event-stream; charset=utf-8"), *headers])
        self._feed = feed
        self._slow = slow

    async def send(self, request: HttpRequest) -> None:
        feed = self._feed
        try:
            request.abandon_with_client()
            request.start(200, self.headers)
            seen, body = feed.number, feed.first()
            while body:
                async with asyncio.timeout(self._slow):
                    await request.write(body)
                body = await feed.next(seen)
                seen = feed.number
            async with asyncio.timeout(self._slow):
                await request.finish(b"event: bye\ndata: {}\n\n")
        except TimeoutError:
            request.reset()
        finally:
            feed.leave()
