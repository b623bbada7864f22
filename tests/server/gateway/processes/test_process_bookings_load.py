"""Processes of a gateway whose load is shared with other gateways too: by Redis, as if each were a gateway of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("redis", reason="needs kvyard[redis]")
pytest.importorskip("httptools", reason="needs kvyard[server]")

from tests.index.redis.server import RedisServer, run_redis
from tests.server.gateway.processes.support import several
from tests.server.gateway.processes.test_whole_view import Held, booked
from tests.server.gateway.scripted_engine import ScriptedEngine
from tests.server.gateway.support import Gated

pytestmark = [pytest.mark.zmq, pytest.mark.redis, pytest.mark.slow]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    yield from run_redis(tmp_path)


def test_each_request_is_booked_once_everywhere(redis: RedisServer) -> None:
    """By the processes of one gateway and by another gateway, whichever of them has it."""
    engine = Held()
    with ScriptedEngine(engine) as scripted:
        settings: dict[str, Any] = {"engines": [{"url": scripted.url, "name": "e"}], "share": redis.url}
        with several(2, **settings) as ((a, b), _), Gated(**settings) as other:
            everywhere = [gated.ready(1) for gated in (a, b, other)]
            threads = [
                threading.Thread(target=lambda gated=gated: gated.complete("x"))  # type: ignore[misc]
                for gated in (a, b, b, other)
            ]
            for thread in threads:
                thread.start()
            eventually(lambda: [booked(gated) for gated in everywhere] == [4, 4, 4])
            # What one process finds out about the other's engines still goes by the channel, and load by Redis alone.
            health = a.client.get("/health").json()
            assert (health["under_way"], health["engines"]) == (3, {"ready": 1})
            engine.go.set()
            for thread in threads:
                thread.join()
            eventually(lambda: [booked(gated) for gated in everywhere] == [0, 0, 0])
