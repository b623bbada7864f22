"""A server for all tests of a process, and one per test for those that hurt it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.index.redis.server import PROGRAM, RedisServer


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if PROGRAM is None:
        pytest.skip("needs redis-server: scripts/setup-test-deps.sh")
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    if PROGRAM is None:
        pytest.skip("needs redis-server: scripts/setup-test-deps.sh")
    server = RedisServer(tmp_path)
    try:
        server.start()
        yield server
    finally:
        server.close()
