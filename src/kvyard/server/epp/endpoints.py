"""Endpoints: the address and port at which a data plane reaches each engine. Names of hosts are looked up, again and again."""

import logging
from collections.abc import Mapping
from urllib.parse import urlsplit

from kvyard.clock import pause
from kvyard.server.gateway.discovery import Resolver, system_resolver
from kvyard.server.gateway.engine import Engine
from kvyard.server.guard import is_address

log = logging.getLogger(__name__)

ROUND = 1.0
"""Seconds between two looks for engines without an address."""
ROUNDS = 5
"""Rounds between two lookups of names that were found before."""


class Endpoints:
    """The endpoints of one picker's engines. An engine whose host has no address yet has none."""

    def __init__(self, engines: Mapping[str, Engine], resolve: Resolver = system_resolver) -> None:
        self._engines = engines
        self._resolve = resolve
        self._known: dict[str, tuple[str, str]] = {}
        """By engine: its URL, and its endpoint."""
        self._names: dict[str, str] = {}
        """By endpoint: its engine."""
        self.reasons: dict[str, str] = {}
        """By engine: why it has no endpoint."""

    def of(self, engine: Engine) -> str | None:
        """Return the address of an engine as ``ip:port``; ``None`` if unknown."""
        known = self._known.get(engine.name)
        if known is not None and known[0] == engine.url:
            return known[1]
        host, port = _place(engine.url)
        return self._learn(engine, host, port) if is_address(host) else None

    def at(self, endpoint: str) -> Engine | None:
        """Return the engine at ``endpoint``; ``None`` if it is none of ours."""
        engine = self._engines.get(self._names.get(endpoint, ""))
        return engine if engine is not None and self.of(engine) == endpoint else None

    async def look(self, again: bool = True) -> None:
        """Look up the hosts of engines: all of those that are names, or not ``again`` those that were found."""
        gone = self._known.keys() - self._engines.keys()
        for name in gone:
            self._names.pop(self._known.pop(name)[1], None)
        for name in self.reasons.keys() - self._engines.keys():
            del self.reasons[name]
        for engine in list(self._engines.values()):
            host, port = _place(engine.url)
            if (self.of(engine) is not None and not again) or is_address(host):
                continue
            try:
                addresses = await self._resolve(host)
            except OSError as error:
                if self.of(engine) is None:  # a lookup that fails changes nothing that is known
                    self._unknown(engine, error.strerror or str(error))
                continue
            # Those of IPv4 first, as long as clusters have both: all data planes reach them.
            addresses.sort(key=lambda address: (":" in address, address))
            if addresses:
                self._learn(engine, addresses[0], port)
            elif self.of(engine) is None:
                self._unknown(engine, "it has no addresses")

    async def follow(self) -> None:
        """Look until cancelled."""
        while True:
            for number in range(ROUNDS):
                await self.look(again=number == 0)
                await pause(ROUND)

    def _learn(self, engine: Engine, host: str, port: int) -> str:
        endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        before = self._known.get(engine.name)
        if before is not None:
            self._names.pop(before[1], None)
        self._known[engine.name] = (engine.url, endpoint)
        self._names[endpoint] = engine.name
        self.reasons.pop(engine.name, None)
        return endpoint

    def _unknown(self, engine: Engine, why: str) -> None:
        if engine.name not in self.reasons:
            log.warning("%s can't be chosen: its host can't be looked up: %s", engine.name, why)
        self.reasons[engine.name] = why


def _place(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
