"""One view for several gateways: each sends its routed requests to the others, through Redis or Valkey.

A request is sent when it is routed (its engine, its tokens, its blocks), at its first token and at its end. Every other
gateway books it in its own router, so load counts everywhere, and so does a prefix that an engine was sent and hasn't
announced yet. The server is a blackboard: it keeps the messages of the last seconds. Everything else is in the gateways'
memories, and is sent again to each that joins.

A member that is silent for the length of its lease is removed, with all its requests in flight; the server's clock decides.
While the server is away, bookings of others count for one lease more, then a gateway goes by its own view until it is back.
Each beat is one round trip, in a thread: the event loop never waits for the network.

What is kept, by key:

- ``kvyard:share1:<namespace>``, a hash: how these gateways name blocks (``identity``), and the last number given to a member.
- ``…:who``, a hash: each member's number, new each time it joins. ``…:until``, a sorted set: when each is given up, in the
  server's milliseconds.
- ``…:log``, a stream: messages of members, for twice the time of a lease.

All of it goes by itself when no gateway beats. Nothing here needs to survive: members send everything to each that joins.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import threading
from collections import deque
from typing import Any

from kvyard.clock import MS, Clock, WallClock, from_seconds, pause
from kvyard.errors import KvyardError
from kvyard.index.redis.scripts import Script
from kvyard.index.redis.server import Server, Unavailable
from kvyard.router import Router
from kvyard.server.gateway.sharing.bookings import SharedBookings
from kvyard.server.gateway.sharing.peers import Told, encode, size_of

log = logging.getLogger(__name__)

BEAT = Script("beat", package="kvyard.server.gateway.sharing")
"""One call is one beat: renew, send, receive."""

PORTION = 1 << 20
"""Bytes of a heartbeat at most; the rest follows at once."""
BACKLOG = 64 << 20
"""Bytes that wait to be sent. With more, it is quicker to send everything again."""
HEARD = 32
"""Messages that a beat takes in, and more follow at once."""
_FINAL = frozenset({"auth", "policy", "cluster", "readonly", "identity", "noauth", "wrongpass", "noperm", "err"})
"""Kinds of trouble that waiting doesn't mend."""


async def probe(url: str) -> None:
    """Try a server once. Raises ``KvyardError`` for trouble that waiting doesn't mend, such as a wrong password; that it is
    away is only logged.
    """
    try:
        server = Server(url, timeout=2.0, backoff=0, clock=WallClock())
    except ValueError as error:
        raise KvyardError(
            f"the server to share load through has no address: {error}; write redis://HOST:PORT"
        ) from None
    try:
        await asyncio.to_thread(server.connect)
    except Unavailable:
        if _FINAL & server.errors.keys():
            raise KvyardError(f"can't share load through {server.address}: {server.reason}") from None
        log.warning("load can't be shared through %s yet: %s; retrying", server.address, server.reason)
    finally:
        server.close()


class LoadSharing(SharedBookings):
    """A gateway's part in the common view of one pool of workers. For one event loop."""

    def __init__(
        self,
        url: str,
        books: Router,
        *,
        clock: Clock,
        identity: str,
        namespace: str = "default",
        gateway: str | None = None,
        beat_s: float = 0.1,
        lease_s: float = 3.0,
        timeout_s: float = 0.5,
        max_blocks: int = 4096,
    ) -> None:
        """``identity`` is the naming of blocks: gateways that differ in it can't share. ``clock`` is the books' time. At
        most ``max_blocks`` of a prompt are sent. Workers must have the same names in all gateways.

        Raises ``KvyardError`` for an address or figures that can't be. Doesn't connect.
        """
        if beat_s <= 0 or lease_s < 3 * beat_s:
            raise KvyardError(
                f"a lease of {lease_s:g} s is too short for beats each {beat_s:g} s: give it three at least"
            )
        super().__init__(books, clock, max_blocks)
        self.gateway = gateway or f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self.reason = "it wasn't tried yet"
        self._key = f"kvyard:share1:{namespace}"
        self._identity = identity
        self._beat_s = beat_s
        self._lease = from_seconds(lease_s)
        self._real = WallClock()
        self._server = Server(url, timeout=timeout_s, backoff=from_seconds(min(2.0, lease_s)), clock=self._real)
        self._number = ""
        self._last = "0-0"
        self._behind = False
        self._is_away = False
        self._heard_at = 0
        self._outbox: deque[tuple[int, Told | bool]] = deque()
        self._waiting = 0
        """Bytes in the outbox, about."""
        self._bound = BACKLOG
        self._lock = threading.Lock()

    # -- beats ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Beat once. Raises ``KvyardError`` for trouble that waiting doesn't mend, such as a wrong password; a server that is
        away is waited for.
        """
        await self.beat()
        if self.reason and _FINAL & self._server.errors.keys():
            raise KvyardError(f"can't share load through {self._server.address}: {self.reason}")

    async def run(self) -> None:
        """Beat until cancelled, then leave."""
        try:
            while True:
                await self.beat()
                if not (self.connected and (self._outbox or self._behind)):
                    await pause(self._beat_s)
        finally:
            await asyncio.shield(asyncio.to_thread(self._leave))

    async def close(self) -> None:
        """Leave, where ``run`` was never called."""
        await asyncio.to_thread(self._leave)

    async def beat(self) -> None:
        """Send news, receive those of others. Never raises because of the server."""
        self.counters.beats += 1
        changes = self._portion() if self._number else []
        try:
            reply = await asyncio.to_thread(self._exchange, changes)
        except Unavailable:
            self._away()
            return
        word, number, last, who, heard, seen = reply
        self._back()
        self._last = last.decode()
        self._behind = seen == HEARD
        if word == b"joined":
            # Earlier reports may be lost, and our view of others may be old: start over on both sides.
            self._number = number.decode()
            self.counters.joins += 1
            self._peers.forget_all()
            self._clear_outbox()
            self._tell_all()
        else:
            self.counters.sent += len(changes)
        present = {name.decode(): number.decode() for name, number in zip(who[::2], who[1::2], strict=True)}
        present.pop(self.gateway, None)
        if self._peers.meet(present) and word != b"joined":
            self._tell_all()
        await self._peers.take(heard)

    def _exchange(self, changes: list[tuple[int, Told | bool]]) -> list[Any]:
        """Exchange changes in one round trip, or three when connecting. In a thread; raises ``Unavailable``."""
        server = self._server
        with self._lock:
            if not server.connected:
                server.connect()
                server.commands([("SCRIPT", "LOAD", BEAT.source)])
                self._number = ""
            payload = encode(changes) if changes and self._number else b""
            lease = self._lease // MS
            reply = server.call(
                BEAT, [self._key], [self.gateway, self._number, self._identity, lease, self._last, HEARD, payload]
            )
            if reply[0] == b"identity":
                other = reply[1].decode(errors="replace")
                raise server.fail(f"gateways there name blocks otherwise ({other}, not {self._identity})", "identity")
            return reply

    def _leave(self) -> None:
        """Leave. In a thread, after a beat that may still be in flight."""
        with self._lock:
            if self._server.connected:
                with contextlib.suppress(Unavailable):  # the lease will end it
                    self._server.commands(
                        [("HDEL", f"{self._key}:who", self.gateway), ("ZREM", f"{self._key}:until", self.gateway)]
                    )
            self._server.close()

    # -- telling ----------------------------------------------------------------------------------------------------

    def _tell(self, number: int, change: Told | bool) -> None:
        if not self._number:
            return  # a full statement follows on joining
        self._outbox.append((number, change))
        self._waiting += size_of(change)
        if self._waiting > self._bound:
            self._number = ""
            self._clear_outbox()

    def _tell_all(self) -> None:
        """Send every booking in flight; members that know it already ignore it."""
        for number, booking in self._mine.values():
            self._outbox.append((number, booking))
            self._waiting += size_of(booking)
        self._bound = BACKLOG + self._waiting

    def _portion(self) -> list[tuple[int, Told | bool]]:
        taken: list[tuple[int, Told | bool]] = []
        size = 0
        while self._outbox and size < PORTION:
            change = self._outbox.popleft()
            size += size_of(change[1])
            taken.append(change)
        self._waiting -= size
        return taken

    def _clear_outbox(self) -> None:
        self._outbox.clear()
        self._waiting = 0

    # -- the server ---------------------------------------------------------------------------------------------------

    def _away(self) -> None:
        self.counters.failures += 1
        self._number = ""
        self._clear_outbox()
        self.reason = self._server.reason
        if not self._is_away:
            self._is_away = True
            self.counters.outages += 1
            where, why = self._server.address, self.reason
            log.warning("load isn't shared through %s: %s; until it is, this gateway uses its own view", where, why)
        if self._peers and self._real.now() - self._heard_at > self._lease:
            self._peers.forget_all()

    def _back(self) -> None:
        if self._is_away:
            self._is_away = False
            log.info("load is shared again through %s", self._server.address)
        self.reason = ""
        self._heard_at = self._real.now()
