"""An engine's process is killed with -9 and a new one takes its ports: what the old one had is forgotten, what the new one
has is learned. Nothing tells the gateway but the sockets themselves.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.ports import free_ports
from tests.server.gateway.support import Gated
from tests.server.mock.support import Process

pytestmark = pytest.mark.zmq

OLD, NEW = list(range(16 * 20 + 1)), list(range(1000, 1000 + 16 * 30 + 1))


def hits(gated: Gated, prompt: list[int]) -> int:
    return int(gated.post("/explain", body={"prompt": prompt}).json()["hit_blocks"])


def stream(gated: Gated) -> dict[str, Any]:
    (found,) = gated.engines()["p"]["streams"]
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("noticed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_new_process_on_the_old_ones_ports(noticed: bool) -> None:
    """Whether the gateway saw that it was gone, or looks so seldom that it was back before."""
    first = free_ports(3)
    events, replay = (f"tcp://127.0.0.1:{first + at}" for at in (1, 2))
    arguments = ("--port", str(first), "--kv-events-endpoint", events, "--kv-events-replay-endpoint", replay)
    engine = {"url": f"http://127.0.0.1:{first}", "name": "p", "events": events, "replay": replay}
    looks = {} if noticed else {"health_seconds": 3600.0}
    # What was sent somewhere counts for a while too; here it is to be the index alone that knows.
    with Gated(engines=[engine], router={"predicted_ttl_s": 0}, **looks) as gated:
        with Process(*arguments) as old:
            old.urls()
            gated.ready(1, 1)
            for _ in range(3):
                gated.complete(OLD)
            eventually(lambda: hits(gated, OLD) == 20)
            epoch = stream(gated)
            old.process.kill()
            old.process.wait()
        if noticed:
            eventually(lambda: gated.engines()["p"]["state"] == "down")
        with Process(*arguments) as new:
            new.urls()
            gated.ready(1)
            # The new one has said nothing yet.
            eventually(lambda: hits(gated, OLD) == 0, lambda: (epoch, stream(gated)))
            reply = gated.complete(NEW)
            assert "hit=0/30" in reply.headers["x-kvyard-decision"]
            eventually(lambda: hits(gated, NEW) == 30, lambda: (epoch, stream(gated)))
            assert hits(gated, OLD) == 0
            gated.ready(1, 1)
            reply = gated.complete(NEW)
            assert "hit=30/30" in reply.headers["x-kvyard-decision"]
            assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 16 * 30
            gated.idle()
