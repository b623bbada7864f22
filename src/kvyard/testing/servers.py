"""A mock fleet and a gateway for tests, each on free ports of this machine."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvyard.server.gateway.config import convert
from kvyard.server.gateway.routes import build
from kvyard.server.mock.config import make_config
from kvyard.server.mock.faults import changed
from kvyard.server.mock.fleet import MockFleet
from kvyard.server.mock.schemas import EventStream
from kvyard.server.running import HttpServer, listen
from kvyard.testing.threads import ThreadedService

LOOPBACK = "tcp://127.0.0.1:0"
HOST = "127.0.0.1"


class FleetServer(ThreadedService):
    """A fleet of mock engines with KV events. Settings are those of ``kvyard mock``: ``workers=2, block_size=16, ...``."""

    def __init__(self, *, port: int = 0, faults: Mapping[str, Any] | None = None, **settings: object) -> None:
        """Binds the ports: free ones, or those from ``port`` on. ``faults`` are fields of ``MockFaults``, for all workers:
        ``{"error_rate": 0.1}``. Raises ``KvyardError`` for what can't be.
        """
        super().__init__()
        events = {"kv_events_endpoint": LOOPBACK, "kv_events_replay_endpoint": LOOPBACK, "drain_seconds": 1}
        config = make_config({**events, **settings})
        config = msgspec.structs.replace(config, faults=changed(config.faults, faults or {}))
        self.fleet = MockFleet(config, HOST, port)

    @property
    def urls(self) -> list[str]:
        """Addresses of the workers."""
        return self.fleet.urls

    @property
    def url(self) -> str:
        """Address of the first worker."""
        return self.urls[0]

    @property
    def model(self) -> str:
        """Name of the model for clients."""
        return self.fleet.config.served_model_name

    def streams(self, worker: int = 0) -> Sequence[EventStream]:
        """Return endpoints on which a worker's ranks publish, and replay missed batches."""
        return self.fleet.workers[worker].streams

    def kill(self, worker: int) -> None:
        """Let a worker die as after ``kill -9``."""
        self.call(self.fleet.kill(worker))

    def revive(self, worker: int) -> None:
        """Start a dead worker again, at its old addresses and with an empty cache."""
        self.call(self.fleet.revive(worker))

    def set_faults(self, worker: int | None = None, **faults: Any) -> None:
        """Change faults of one worker, or of all, from the next request on; fields that aren't named stay.

        Raises ``KvyardError`` for a fault that there isn't, and for a value that makes no sense.
        """
        workers = self.fleet.workers if worker is None else [self.fleet.workers[worker]]
        for target, new in [(target, changed(target.faults, faults)) for target in workers]:
            target.faults = new

    async def serve(self, ready: Callable[[], None]) -> None:
        async with self.fleet:
            ready()
            await self._stopping.wait()


class GatewayServer(ThreadedService):
    """A gateway in front of fleets and engines, ready once it has looked at each of them. Settings are those of its file:
    ``router={"policy": "kv"}``, ``retries=1``.
    """

    def __init__(self, *fleets: FleetServer, engines: Sequence[object] = (), **settings: Any) -> None:
        """``engines`` are addresses, or tables as in the gateway's file. Raises ``KvyardError`` for settings that can't be."""
        super().__init__()
        described = [{"url": engine} if isinstance(engine, str) else engine for engine in engines]
        options: dict[str, Any] = {"health_seconds": 0.2, "tokenizer": "bytes", **settings}
        options["fleets"] = [*options.get("fleets", ()), *(fleet.url for fleet in fleets)]
        options["engines"] = [*options.get("engines", ()), *described]
        if isinstance(options.get("router"), str):
            options["router"] = {"policy": options["router"]}
        self._app, self.gateway = build(convert(options, "the test"))
        self._bound = listen(HOST, 0)
        self._server = HttpServer(self._app, self._bound, drain_seconds=1)
        self.url = self._server.url

    def engines(self) -> list[str]:
        """Return the names of the engines that get requests now."""
        return sorted(name for name, engine in self.gateway.members.engines.items() if engine.state == "ready")

    async def serve(self, ready: Callable[[], None]) -> None:
        with self._bound:
            async with self.gateway:
                await self._server.start()
                await self.gateway.members.looked_at(False)
                ready()
                await self._server.wait()

    def end(self) -> None:
        self.gateway.drain()
        self._server.end()
