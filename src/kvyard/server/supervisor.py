"""The supervisor: runs tasks beside requests for as long as a server runs, and restarts them when they fail.

A task that fails is logged once, counted, and begun again after a pause that doubles up to ``LONGEST`` seconds; one that
ran for a while starts over with the shortest pause. Its owner receives each failure before the pause, so that it can mark
what depends on the task as not to be trusted meanwhile.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import msgspec

from kvyard.clock import SECOND, WallClock, pause

log = logging.getLogger(__name__)

SHORTEST = 0.05
"""Seconds before a task that failed is begun again."""
LONGEST = 5.0
STEADY = 30 * SECOND
"""Time that a task must have run for its next failure to count as the first."""

Work: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
"""Makes what is to run, each time it is begun."""
Failed: TypeAlias = Callable[[Exception], None]


class Supervised(msgspec.Struct, eq=False):
    """One task, for as long as it is wanted."""

    name: str
    failures: int = 0
    """Over all time."""
    reason: str = ""
    """Why it isn't running; empty while it is."""
    task: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        """End it. Twice does no harm."""
        task, self.task = self.task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class Supervisor:
    """The tasks of one server. For one event loop."""

    def __init__(self) -> None:
        self.tasks: set[Supervised] = set()
        """Tasks that are to run."""
        self.failures = 0
        """Of all tasks, those that are gone too."""
        self._clock = WallClock()
        self._passing: set[asyncio.Task[None]] = set()

    def keep(self, name: str, work: Work, failed: Failed | None = None) -> Supervised:
        """Run ``work`` until it returns or is stopped, and again whenever it fails. ``failed`` receives each failure."""
        kept = Supervised(name)
        self.tasks.add(kept)
        kept.task = asyncio.get_running_loop().create_task(self._run(kept, work, failed), name=name)
        kept.task.add_done_callback(lambda task: self.tasks.discard(kept))
        return kept

    def begin(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run something once, beside; a failure is counted and logged."""

        async def once() -> None:
            try:
                await work
            except Exception as error:
                self.failures += 1
                log.error("%s failed: %s", name, error_text(error), exc_info=error)

        task = asyncio.get_running_loop().create_task(once(), name=name)
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)

    async def stop(self) -> None:
        """End all of them."""
        for task in self._passing:
            task.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)
        await asyncio.gather(*(task.stop() for task in list(self.tasks)))

    async def _run(self, kept: Supervised, work: Work, failed: Failed | None) -> None:
        wait = SHORTEST
        last = ""
        while True:
            began = self._clock.now()
            try:
                await work()
                return
            except Exception as error:
                kept.failures += 1
                self.failures += 1
                kept.reason = error_text(error)
                if self._clock.now() - began >= STEADY:
                    wait, last = SHORTEST, ""
                # A repetition is only counted: the first time was logged with its traceback.
                if kept.reason != last:
                    log.error("%s failed and is begun again: %s", kept.name, kept.reason, exc_info=error)
                last = kept.reason
                if failed is not None:
                    failed(error)
            await pause(wait)
            wait = min(2 * wait, LONGEST)
            kept.reason = ""


def error_text(error: BaseException) -> str:
    """Return an error in a few words."""
    return f"{type(error).__name__}: {error}"[:300]
