"""Waiting for what a test waits for: probes until a condition holds. Nothing else in the tests sleeps for a fixed time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 60.0
"""Seconds that anything may take; the machine may be busy."""
INTERVAL = 0.002
"""Seconds between two probes."""


def eventually(true: Callable[[], Any], why: Callable[[], object] = lambda: "", seconds: float = PATIENCE) -> Any:
    """Wait until ``true()`` is true and return its value. A ``LookupError`` counts as false, until ``seconds`` have passed;
    then the test fails with ``why()``.
    """
    stop = time.monotonic() + seconds
    while True:
        try:
            value = true()
        except LookupError:
            if time.monotonic() >= stop:
                raise
            value = None
        if value:
            return value
        assert time.monotonic() < stop, why()
        time.sleep(INTERVAL)


async def eventually_async(true: Callable[[], Any], why: Callable[[], object] = lambda: "") -> Any:
    """``eventually`` for a condition that other tasks of the event loop bring about."""
    stop = time.monotonic() + PATIENCE
    while not (value := true()):
        assert time.monotonic() < stop, why()
        await asyncio.sleep(INTERVAL)
    return value


def retried(action: Callable[[], Any], error: type[Exception]) -> Any:
    """Return the result of ``action`` once it no longer raises ``error``."""
    stop = time.monotonic() + PATIENCE
    while True:
        try:
            return action()
        except error:
            if time.monotonic() >= stop:
                raise
            time.sleep(INTERVAL)
