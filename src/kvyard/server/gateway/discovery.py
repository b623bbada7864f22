"""Engines by name: one name, many addresses, looked up again and again, as a headless service of Kubernetes has it.

A lookup is the operating system's, so ``/etc/hosts``, search domains and caches count as for any other program. Names fail to
resolve when resolvers restart, and answers may lack an address for a moment: a failed lookup changes nothing, and an address is
gone only when several answers in a row lack it. Whether an engine is alive isn't asked here; health checks know sooner.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple, TypeAlias

import msgspec

from kvyard.clock import pause
from kvyard.errors import KvyardError

log = logging.getLogger(__name__)

Resolver: TypeAlias = Callable[[str], Awaitable[list[str]]]
"""Takes a name and returns its addresses; raises ``OSError`` if it has none."""


class Address(msgspec.Struct, frozen=True, order=True):
    """One engine of a name."""

    host: str
    port: int

    @property
    def netloc(self) -> str:
        """Host and port as in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Change(NamedTuple):
    """Changes of a name's addresses; each sorted."""

    added: tuple[Address, ...] = ()
    removed: tuple[Address, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed)


async def system_resolver(host: str) -> list[str]:
    """Return the addresses that this machine's resolver gives. Raises ``OSError``."""
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    # A scoped address (fe80::1%eth0) is kept as it is; the rest of the tuple says nothing of use.
    return sorted({str(address[0]) for *_, address in addresses})


class DnsWatch(msgspec.Struct, eq=False):
    """The addresses of one name. Doesn't look yet. Raises ``KvyardError`` for a name or figures that can't be."""

    host: str
    port: int
    interval_s: float = 5.0
    """Between two looks."""
    patience: int = 3
    """Answers in a row that must lack an address before it is gone."""
    timeout_s: float = 5.0
    resolve: Resolver = system_resolver
    failures: int = 0
    """Lookups that failed, over all time."""
    reason: str = ""
    """Why the last one did; empty where it didn't."""
    _missed: dict[Address, int] = {}
    """All addresses, with how many answers in a row lacked each."""
    _looking: asyncio.Future[list[str]] | None = None

    def __post_init__(self) -> None:
        if not self.host or any(character.isspace() or character in "/@?#" for character in self.host):
            raise KvyardError(f"{self.host!r} is no name of a host: write it as in http://NAME:PORT")
        if not 0 < self.port < 65536:
            raise KvyardError(f"the port of {self.host} must be from 1 to 65535, not {self.port}")
        if self.interval_s <= 0 or self.timeout_s <= 0 or self.patience < 1:
            raise KvyardError(f"looking up {self.host} needs an interval, a time-out and a patience above 0")

    @property
    def addresses(self) -> frozenset[Address]:
        """Return the known addresses."""
        return frozenset(self._missed)

    async def look(self) -> Change:
        """Look the name up once. Never raises: a failure is counted, and what was known holds."""
        if self._looking is None:
            self._looking = asyncio.ensure_future(self.resolve(self.host))
            self._looking.add_done_callback(_seen)
        # A lookup runs in a thread that can't be stopped: one that is late is waited for again, not begun again.
        done, _ = await asyncio.wait([self._looking], timeout=self.timeout_s)
        if not done:
            return self._failed(f"no answer within {self.timeout_s:g} s")
        looked, self._looking = self._looking, None
        error = looked.exception()
        if error is not None:
            return self._failed(getattr(error, "strerror", None) or str(error) or type(error).__name__)
        present = {Address(host, self.port) for host in looked.result()}
        if not present:
            return self._failed("it has no addresses")
        if self.reason:
            log.info("%s is found again", self.host)
            self.reason = ""
        return self._take(present)

    async def watch(self) -> AsyncIterator[Change]:
        """Yield changes: the first answer at once, whatever it is, and then each change, for ever."""
        change = await self.look()
        yield change
        while True:
            await pause(self.interval_s)
            change = await self.look()
            if change:
                yield change

    def _take(self, addresses: set[Address]) -> Change:
        missed = self._missed
        added = sorted(addresses - missed.keys())
        gone: list[Address] = []
        for address in sorted(missed):
            count = 0 if address in addresses else missed[address] + 1
            if count >= self.patience:
                gone.append(address)
                del missed[address]
            else:
                missed[address] = count
        missed.update(dict.fromkeys(added, 0))
        return Change(tuple(added), tuple(gone))

    def _failed(self, why: str) -> Change:
        self.failures += 1
        if not self.reason:
            log.warning("%s can't be looked up: %s; its %d addresses are kept", self.host, why, len(self._missed))
        self.reason = why
        return Change()


def _seen(looked: asyncio.Future[list[str]]) -> None:
    """Take note of an error: where watching stops in mid-lookup, asyncio would complain that it was never looked at."""
    if not looked.cancelled():
        looked.exception()
