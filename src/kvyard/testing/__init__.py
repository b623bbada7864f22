"""For tests of routers, clients and dashboards: mock fleets, gateways and event streams that run inside the test's process.

    with kvyard.testing.fleet(workers=2) as engines:
        ...  # engines.urls answer as vLLM does, and publish KV events

As a pytest plugin it gives the fixtures ``mock_fleet``, ``gateway`` and ``event_stream``: see ``kvyard.testing.plugin``.
"""

from kvyard.testing.servers import FleetServer, GatewayServer
from kvyard.testing.streams import StreamReader

fleet = FleetServer
"""``with kvyard.testing.fleet(workers=2, ...) as engines``."""
gateway = GatewayServer
"""``with kvyard.testing.gateway(engines, router="kv") as front``."""
stream = StreamReader
"""``with kvyard.testing.stream(engines) as seen``."""

__all__ = ["FleetServer", "GatewayServer", "StreamReader", "fleet", "gateway", "stream"]
