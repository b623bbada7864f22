"""An event loop whose time jumps to the next timer when nothing is left to do: servers and clients on it talk over real
sockets, and take exactly as long as they say, however busy the machine is.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

import kvyard.clock

T = TypeVar("T")
SETTLE = 0.001
"""Real seconds in which what was sent on loopback arrives, even where the kernel puts it off."""


class _Jumping(selectors.DefaultSelector):
    """Passes time in place of waiting for it."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        found = super().select(0)
        if found or timeout <= 0:
            return found
        found = super().select(min(SETTLE, timeout))
        if not found:
            self.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its ``time`` is that of the jumps."""

    def __init__(self) -> None:
        self.jumping = _Jumping()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now


def run_virtually(monkeypatch: pytest.MonkeyPatch, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``; kvyard's clocks go by the loop's time meanwhile."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()

        def ns() -> int:
            return round(loop.time() * 1e9)

        monkeypatch.setattr(kvyard.clock, "time", SimpleNamespace(monotonic_ns=ns, time_ns=ns))
        try:
            return runner.run(work)
        finally:
            monkeypatch.undo()
