"""Networks that a server may connect to on request: otherwise a client that may register a worker could have it connect
anywhere."""

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from kvyard.errors import KvyardError
from kvyard.server.http import Refusal


class Networks:
    """Addresses that are allowed; without any network, all are."""

    def __init__(self, networks: Iterable[str]) -> None:
        """Raises ``KvyardError`` for what is no network."""
        self._allowed: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for text in networks:
            try:
                self._allowed.append(ipaddress.ip_network(text))
            except ValueError as error:
                raise KvyardError(f"networks: {error}; write 10.0.0.0/8 or one address") from None

    async def check(self, addresses: Iterable[str | None]) -> None:
        """Raise ``Refusal`` unless all of ``addresses``, as in ``http://host:port`` or ``tcp://host:port``, lie within. A name
        must do so with all that it resolves to now.
        """
        if not self._allowed:
            return
        for address in addresses:
            if address is None:
                continue
            host = urlsplit(address).hostname
            if not host:
                raise self._refusal(address)
            try:
                addresses_found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError):
                raise Refusal(422, f"{host[:200]!r} can't be looked up", fix="give an address") from None
            for *_, (ip, *_rest) in addresses_found:
                plain = ipaddress.ip_address(str(ip).partition("%")[0])
                if not any(plain in network for network in self._allowed):
                    raise self._refusal(address)

    def _refusal(self, address: str) -> Refusal:
        allowed = ", ".join(map(str, self._allowed))
        return Refusal(403, f"{address[:200]!r} is in none of the networks {allowed}", fix="see the setting networks")
