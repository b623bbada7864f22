"""A server for all tests of a process, and one per test for those that hurt it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.index.redis.server import RedisServer, run_redis


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from run_redis(tmp_path_factory.mktemp("redis"))


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    yield from run_redis(tmp_path)
