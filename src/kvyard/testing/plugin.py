"""The pytest plugin: fixtures that make fleets, gateways and streams, and end them with the test.

Each is a function, so that a test says what it needs, as often as it needs it:

    def test_my_router(mock_fleet, event_stream):
        fleet = mock_fleet(workers=2, block_size=16)
        stream = event_stream(fleet, worker=1)

Nothing of kvyard's servers is imported before a test asks for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvyard.testing.servers import FleetServer, GatewayServer
    from kvyard.testing.streams import StreamReader


@pytest.fixture
def mock_fleet() -> Iterator[Callable[..., FleetServer]]:
    """Makes mock fleets on free ports, with KV events: ``mock_fleet(workers=2, ...)``, settings as of ``kvyard mock``."""
    with ExitStack() as running:

        def make(**settings: Any) -> FleetServer:
            from kvyard.testing.servers import FleetServer

            return running.enter_context(FleetServer(**settings))

        yield make


@pytest.fixture
def gateway(mock_fleet: Callable[..., FleetServer]) -> Iterator[Callable[..., GatewayServer]]:
    """Makes gateways: ``gateway(fleet, router="kv", ...)``. They end before the fleets do."""
    with ExitStack() as running:

        def make(*fleets: FleetServer, **settings: Any) -> GatewayServer:
            from kvyard.testing.servers import GatewayServer

            return running.enter_context(GatewayServer(*fleets, **settings))

        yield make


@pytest.fixture
def event_stream(mock_fleet: Callable[..., FleetServer]) -> Iterator[Callable[..., StreamReader]]:
    """Makes readers of event streams: ``event_stream(fleet, worker=1)``, or ``event_stream("tcp://...")``."""
    with ExitStack() as running:

        def make(source: FleetServer | str, **options: Any) -> StreamReader:
            from kvyard.testing.streams import StreamReader

            return running.enter_context(StreamReader(source, **options))

        yield make
