"""A subscriber for tests that have no event loop: each call runs one until it returns."""

from __future__ import annotations

import asyncio

from kvyard.events.transport import Subscriber, Update


class BlockingSubscriber:
    """``Subscriber`` with a loop of its own. ``open`` and ``close`` it, or use it in a ``with`` block."""

    def __init__(self, endpoint: str, **options) -> None:
        self.inner = Subscriber(endpoint, **options)
        self._runner = asyncio.Runner()

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def open(self) -> BlockingSubscriber:
        async def opened() -> None:
            self.inner.open()

        self._runner.run(opened())
        return self

    def receive(self, timeout: float | None = None) -> Update | None:
        return self._runner.run(self.inner.receive(timeout))

    def close(self) -> None:
        self.inner.close()
        self._runner.close()

    def __enter__(self) -> BlockingSubscriber:
        return self.open()

    def __exit__(self, *_) -> None:
        self.close()
