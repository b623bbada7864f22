"""A session with the server: its epoch, this process's leases, and the states that other writers report.

One *lease* per owner determines who writes for it. Each new lease has a new token, and the server's scripts refuse older ones.
So a writer that slept through the end of its lease can't disturb the next one, and neither can delayed commands of a broken
connection.

An *epoch* is one life of the data. Another run of the server starts a new one even where it loaded a dump, because that may
be from any time before. A session takes nothing over from one connection to the next: leases are got and all rows written
again.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvyard.clock import MS, Clock
from kvyard.index.redis import scripts
from kvyard.index.redis.directory import Directory
from kvyard.index.redis.scripts import Script
from kvyard.index.redis.server import Server

PURGE_ROUNDS = 8


class ReplicaSession(msgspec.Struct, kw_only=True, eq=False):
    """The server as one replica of one index sees it. All methods raise ``Unavailable`` unless they say otherwise."""

    server: Server
    directory: Directory
    namespace: str
    replica: str
    identity: str
    lease: int
    """Nanoseconds after its last sign of life that a writer is given up."""
    clock: Clock
    acquired: Callable[[str], None]
    """Called with each owner whose lease was got."""
    lost: Callable[[str | None], None]
    """Called with each owner whose lease was lost, ``None`` for all."""
    tokens: dict[str, int] = {}
    """The leases that are ours."""
    wanted: dict[str, None] = {}
    """The leases that we want."""
    epoch: str = ""
    fenced: int = 0
    """Leases that turned out to be another replica's when we used them."""
    epochs: int = 0
    """Epochs that were begun here: servers that were empty, or may not have held what they should."""
    _maintain_at: int = 0
    _maintained: int = 0
    _look_at: int = 0
    _void: list[bytes] = []
    """Epochs whose keys are still there, and how far the one at the end was looked through."""
    _cursor: bytes = b"0"
    _broken: str = ""
    """An epoch among whose keys is one of another type: it can't be mended, only left."""

    def __post_init__(self) -> None:
        self.server.farewell = self._farewell

    @property
    def _meta(self) -> list[str]:
        return [f"kvyard:{self.namespace}"]

    @property
    def due(self) -> int:
        """Return the time at which ``ready`` or ``look`` has something to do."""
        return min(self._maintain_at, self._look_at) if self.server.connected else self.server.retry_at

    def ready(self) -> None:
        """Be connected to the server that we know, with leases renewed and those that are free got."""
        if not self.server.connected:
            if self.epoch:
                self._broken = self.epoch if self.server.trouble == "wrongtype" else ""
                self.lose_all()
            self.server.connect()
            self._begin()
        elif self.clock.now() >= self._maintain_at:
            self.maintain()

    def maintain(self) -> None:
        """Renew the leases that are ours and get those that are free, now."""
        now = self.clock.now()
        slept = self.tokens and self._maintained and now - self._maintained > self.lease
        self._maintained = now
        self._maintain_at = now + self.lease // 3
        if slept:
            # Our leases are over, and much may wait to be read. Vouch for nothing before there was time to read it.
            return
        ttl = max(self.lease // MS, 1)
        if self.tokens:
            for owner in self.call(scripts.RENEW, self.replica, ttl, *self._pairs())[1:]:
                self.lose(owner.decode())
        lacking = [owner for owner in self.wanted if owner not in self.tokens]
        if not lacking:
            return
        replies = self.calls(scripts.ACQUIRE, [(owner, self.replica, ttl) for owner in lacking])
        for owner, reply in zip(lacking, replies, strict=True):
            if reply[0] == b"ok":
                self.tokens[owner] = reply[1]
                self.acquired(owner)
            elif reply[2] > 0:
                # Not before its end, and soon after it.
                self._maintain_at = min(self._maintain_at, now + (reply[2] + 1) * MS)

    def call(self, script: Script, *args: Any) -> list[Any]:
        """Run a script in our epoch."""
        return self.calls(script, [args])[0]

    def calls(self, script: Script, each: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Run a script several times, in one round trip."""
        replies = self.server.calls(script, self._meta, [[self.epoch, *args] for args in each])
        if any(reply[0] == b"epoch" for reply in replies):
            raise self.server.fail("it was emptied, or taken over by another index", "emptied")
        return replies

    def command(self, name: str, key: str, *args: Any) -> Any:
        """Run a command on one of the epoch's keys."""
        return self.server.commands([(name, f"kvy:{self.epoch}:{key}", *args)])[0]

    def scan(self, command: tuple[Any, ...], *options: Any) -> set[bytes]:
        """Return everything that SCAN or SSCAN finds."""
        names: set[bytes] = set()
        cursor = b"0"
        while True:
            ((cursor, some),) = self.server.commands([(*command, cursor, *options, "COUNT", 1000)])
            names.update(some)
            if cursor == b"0":
                return names

    def want(self, owner: str) -> None:
        """Get the lease of ``owner`` as soon as it is free. Raises nothing."""
        if owner not in self.wanted:
            self.wanted[owner] = None
            self._maintain_at = 0

    def lose(self, owner: str) -> None:
        """Note that another replica has the lease. Raises nothing."""
        if self.tokens.pop(owner, None) is not None:
            self.fenced += 1
            self.lost(owner)
        self._look_at = 0

    def lose_all(self) -> None:
        """Discard all knowledge of the server. Raises nothing."""
        self.tokens.clear()
        self.directory.forget()
        self.epoch = ""
        self._maintain_at = self._look_at = 0
        self.lost(None)

    def release(self) -> None:
        """Give all leases back: our rows earn nothing from then on."""
        if self.tokens:
            self.call(scripts.RELEASE, *self._pairs())

    def look(self, *, now: bool = False) -> None:
        """Read slots and writers' records, if that is due, or ``now``."""
        asked = self.clock.now()
        if not now and asked < self._look_at and self.directory.version != b"?":
            return
        self.take(self.call(scripts.STATE)[1], asked)

    def take(self, state: list[Any], asked: int) -> None:
        """Learn it from an answer to a question that was asked at ``asked``. Raises nothing."""
        self.directory.take(state, asked)
        for owner, token in list(self.tokens.items()):
            known = self.directory.owners.get(owner)
            if known is None or known.token != b"%d" % token:
                self.lose(owner)
        end = self.directory.next_end()
        self._look_at = min(asked + self.lease // 3, end or asked + self.lease)

    def purge(self) -> None:
        """Remove keys of void epochs, some at a time."""
        for _ in range(PURGE_ROUNDS if self._void else 0):
            match = b"kvy:" + self._void[-1] + b"*"
            ((self._cursor, keys),) = self.server.commands([("SCAN", self._cursor, "MATCH", match, "COUNT", 1000)])
            if keys:
                self.server.commands([("UNLINK", *keys)])
            if self._cursor == b"0":
                self.server.commands([("SREM", f"{self._meta[0]}:void", self._void.pop())])
                return

    # -- inside -----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start in the server's epoch."""
        fresh = secrets.token_urlsafe(6)[:6]
        meta = self._meta[0]
        (kind,) = self.server.commands([("TYPE", meta)])
        if kind not in (b"hash", b"none"):
            what = f"its key {meta} is a {kind.decode()} of another program: remove it, or choose another namespace"
            raise self.server.fail(what, "wrongtype")
        if self._broken and self.server.commands([("HGET", meta, "epoch")])[0] == self._broken.encode():
            self.server.commands([("HDEL", meta, "run")])  # begins a new epoch, and the keys of this one are removed
        self._broken = ""
        ((epoch, identity),) = self.server.calls(scripts.BEGIN, self._meta, [[self.server.run, fresh, self.identity]])
        if identity.decode() != self.identity:
            other = f"another index ({identity.decode()}), not this ({self.identity})"
            raise self.server.fail(f"its namespace {self.namespace!r} has {other}", "identity")
        self.epoch = epoch.decode()
        self.epochs += self.epoch == fresh
        self._void = self.server.commands([("SMEMBERS", f"{self._meta[0]}:void")])[0]
        self._cursor = b"0"
        self.maintain()

    def _pairs(self) -> list[str | int]:
        return [text for pair in self.tokens.items() for text in pair]

    def _farewell(self) -> tuple[Script, Sequence[str], Sequence[Any]] | None:
        """Before giving up on a server that refuses our writes: rows that can't be corrected shouldn't be vouched for."""
        return (scripts.RELEASE, self._meta, [self.epoch, *self._pairs()]) if self.tokens else None
