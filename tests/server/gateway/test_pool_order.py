"""A mock and its gateway find each other in whichever order they are started."""

from __future__ import annotations

import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.ports import free_ports
from tests.server.gateway.support import Gated

from kvyard.testing.servers import FleetServer


@pytest.mark.zmq
def test_a_gateway_that_was_there_first_takes_the_workers_in_with_all_their_streams() -> None:
    port = free_ports(3)
    with Gated(fleets=[f"http://127.0.0.1:{port}"]) as front:
        assert front.gateway.members.engines == {}
        with FleetServer(port=port, workers=3):
            eventually(lambda: len(front.gateway.members.engines) == 3)
            assert all(engine.config.events for engine in front.gateway.members.engines.values())
