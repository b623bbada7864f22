"""Indexes on a test's server, and waiting for what must come true."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.index.redis.server import RedisServer
from tests.waiting import eventually

from kvyard.index import Identity
from kvyard.index.redis import RedisIndex, SharedIndexer

PATIENCE = 60.0
SLOW = 20.0
"""A time-out for tests that aren't about time-outs: others may have the processor for a while."""
_numbers = itertools.count()


def namespace() -> str:
    """One that nobody has used."""
    return f"test-{os.getpid()}-{next(_numbers)}"


@contextlib.contextmanager
def rows(server: RedisServer, **options: Any) -> Iterator[RedisIndex]:
    """A backend by itself."""
    options = {"namespace": namespace(), "timeout": SLOW, "lease": 60.0, **options}
    index = RedisIndex(options.pop("url", server.url), **options)
    try:
        yield index
    finally:
        index.close()


@contextlib.contextmanager
def shared(server: RedisServer, block_size: int = 4, **options: Any) -> Iterator[SharedIndexer]:
    """A replica."""
    options = {"namespace": namespace(), "timeout": SLOW, "lease": 60.0, **options}
    indexer = SharedIndexer(options.pop("url", server.url), Identity(block_size), **options)
    try:
        yield indexer
    finally:
        indexer.close()


def until(true: Callable[[], bool], what: Callable[[], object] = lambda: "") -> float:
    """Wait for something; how long that took, in seconds."""
    start = time.monotonic()
    eventually(true, what)
    return time.monotonic() - start


def expire(server: RedisServer, index: RedisIndex, owner: str) -> None:
    """Let a lease run out at once."""
    assert server.ask("DEL", f"kvy:{index.session.epoch}:lease:{owner}").startswith(":1")
