"""For tests of routers, clients and dashboards: mock fleets, gateways and event streams that run inside the test's process.

    with kvyard.testing.fleet(workers=2) as engines:
        ...  # engines.urls answer as vLLM does, and publish KV events

As a pytest plugin it gives the fixtures ``mock_fleet``, ``gateway`` and ``event_stream``: see ``kvyard.testing.plugin``. pytest
loads that wherever kvyard is installed, so nothing is imported here before it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvyard.testing.servers import FleetServer, GatewayServer
    from kvyard.testing.servers import FleetServer as fleet
    from kvyard.testing.servers import GatewayServer as gateway
    from kvyard.testing.streams import StreamReader
    from kvyard.testing.streams import StreamReader as stream

__all__ = ["FleetServer", "GatewayServer", "StreamReader", "fleet", "gateway", "stream"]

_FROM = {
    "FleetServer": ("servers", "FleetServer"),
    "GatewayServer": ("servers", "GatewayServer"),
    "StreamReader": ("streams", "StreamReader"),
    "fleet": ("servers", "FleetServer"),
    "gateway": ("servers", "GatewayServer"),
    "stream": ("streams", "StreamReader"),
}


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _FROM[name]
    return getattr(import_module(f"{__name__}.{module}"), attribute)
