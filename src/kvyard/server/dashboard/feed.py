"""The feed: looks at a fleet once a second while it is watched, and hands every viewer the same bytes.

A viewer that can't keep up misses frames, and gets the newest when it is ready again. Without viewers it looks every other
second and keeps only what charts need. It knows no HTTP.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from kvyard.clock import pause
from kvyard.server.dashboard.view import FleetView, ViewSource

log = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds between two looks."""
REMEMBERED = 600
"""Points kept for later viewers: ten minutes."""
MOST_VIEWERS = 32


CHARTED = ("queued", "requests", "finished", "failed", "prompt_tokens", "output_tokens", "prompts", "ttft")
"""Totals that charts show."""


def point_of(view: FleetView) -> msgspec.Raw:
    """Return the data for charts of one look, as JSON: as objects, those of ten minutes take five times as much memory."""
    point: dict[str, Any] = {
        "at": view.at,
        "since": view.since,
        "running": sum(worker.running for worker in view.workers),
        "waiting": sum(worker.waiting for worker in view.workers),
        **{name: getattr(view.totals, name) for name in CHARTED},
    }
    return msgspec.Raw(msgspec.json.encode(point))


def frame(event: str, value: object) -> bytes:
    """Return a server-sent event. JSON has no raw line breaks, so it is one line."""
    return b"event: %b\ndata: %b\n\n" % (event.encode(), msgspec.json.encode(value))


IDLE_INTERVAL = 2.0
"""Seconds between two looks while no viewer is there."""


class ViewFeed:
    """Content for all viewers. Used on one event loop at a time."""

    def __init__(self, source: ViewSource, look: Callable[[], Awaitable[None]] | None = None) -> None:
        """``look`` is awaited before each look, where the source has to ask others."""
        self.source = source
        self.idle_interval = IDLE_INTERVAL
        self._ask = look
        self.closed = False
        self.interval = INTERVAL
        self.most_viewers = MOST_VIEWERS
        self.viewers = 0
        self.number = 0
        """Counts the frames."""
        self.history: deque[msgspec.Raw] = deque(maxlen=REMEMBERED)
        self._whole = self._news = b""
        self._newest = -1
        """The last decision that was shown."""
        self._turn = asyncio.Event()
        self._ticking: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def join(self) -> bool:
        """Add a viewer. Returns false if there is no room; ``leave`` must follow a true."""
        if self.closed or self.viewers >= self.most_viewers:
            return False
        self.viewers += 1
        self._loop = asyncio.get_running_loop()
        if self._ticking is None or self._ticking.done():
            self._look()
            self._ticking = self._loop.create_task(self._tick(), name="dashboard feed")
        return True

    def leave(self) -> None:
        """Remove a viewer."""
        self.viewers -= 1
        if not self.viewers and self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None

    def close(self) -> None:
        """Let all viewers go; any thread may call it."""
        self.closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def first(self) -> bytes:
        """Return the first message of a new viewer: the past, and the present."""
        return frame("history", list(self.history)) + self._whole

    async def next(self, seen: int) -> bytes:
        """Return the newest frame after the one numbered ``seen``; empty once the feed is closed."""
        while self.number <= seen and not self.closed:
            await self._turn.wait()
        if self.closed:
            return b""
        # A viewer that missed one also missed its decisions.
        return self._news if self.number == seen + 1 else self._whole

    async def remember(self) -> None:
        """Look at the fleet now and then while no viewer does, so that those who come see what was before. Runs until it is
        cancelled.
        """
        while True:
            if not self.viewers and not self.closed:
                try:
                    await self.refresh()
                    self.history.append(point_of(self.source()))
                except Exception:
                    log.exception("the dashboard's source failed")
            await pause(self.idle_interval)

    async def refresh(self) -> None:
        """Ask others how they are, where there are any; the source has their answers."""
        if self._ask is not None:
            await self._ask()

    async def _tick(self) -> None:
        while not self.closed:
            await pause(self.interval)
            try:
                await self.refresh()
            except Exception:
                log.exception("the dashboard's source failed")
            self._look()

    def _look(self) -> None:
        try:
            view = self.source()
        except Exception:
            # Our fault, and no reason to leave viewers without a sign of life.
            log.exception("the dashboard's source failed")
            self._whole = self._news = frame("trouble", {"error": "the server can't say how it is: see its log"})
        else:
            self.history.append(point_of(view))
            self._whole = frame("view", view)
            fresh = [decision for decision in view.decisions if decision.number > self._newest]
            self._news = frame("view", msgspec.structs.replace(view, decisions=fresh))
            self._newest = max((decision.number for decision in view.decisions), default=self._newest)
        self.number += 1
        self._wake()

    def _wake(self) -> None:
        turn, self._turn = self._turn, asyncio.Event()
        turn.set()
