"""A server in a thread of its own, with an event loop of its own: started when it answers, ended when the block ends."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

from kvyard.errors import KvyardError

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds that a start, an end, or an answer may take: machines that run tests are busy."""


class ThreadedService:
    """A service in a thread. Entering the context returns once it is ready, and raises an exception of its start."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._problem: BaseException | None = None
        self._stopping = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name=type(self).__name__, daemon=True)

    async def serve(self, ready: Callable[[], None]) -> None:
        """Serve until ``end`` is called; ``ready`` is called once requests are answered."""
        raise NotImplementedError

    def end(self) -> None:
        """Have ``serve`` return, which waits for ``_stopping``; any thread may call it."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stopping.set)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(PATIENCE):
            raise KvyardError(f"{type(self).__name__} isn't ready after {PATIENCE:g} s")
        if self._problem is not None:
            self._thread.join(PATIENCE)
            raise self._problem
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            raise KvyardError(f"{type(self).__name__} hasn't ended after {PATIENCE:g} s")

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the service's loop and return its result, or raise its exception."""
        assert self._loop is not None, "it isn't running"
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    def _work(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as problem:
            self._problem = problem
        finally:
            self._ready.set()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.serve(self._ready.set)
