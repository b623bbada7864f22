"""The index on a Redis or Valkey server: rows that many processes read, each written by one.

Every change goes to the mirror first, an index in memory of what this process itself knows. No other process writes for its
owners, so the mirror answers exactly whether a block was held, without a round trip. Then it goes to the server, many at a
time. Lookups ask the server, since only there are the rows of all writers.

Whenever this process gets a lease the server knows nothing of that owner, and all that the mirror has is written. So the
fate of writes in flight never matters, nothing has to be persisted, and a server that is away makes answers empty, never
wrong. ``docs/how-to/redis-index.md`` says more.
"""

import os
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, TypeAlias

from kvyard.clock import Clock, WallClock, from_seconds
from kvyard.errors import KvyardError
from kvyard.hashing.algorithms import packed
from kvyard.index.backend import Rows, Usage
from kvyard.index.bits import bits
from kvyard.index.memory import MemoryIndex
from kvyard.index.places import Places
from kvyard.index.redis import scripts
from kvyard.index.redis.directory import SOLO, Directory
from kvyard.index.redis.server import Server, Unavailable
from kvyard.index.redis.session import ReplicaSession
from kvyard.index.rows import joined

FLUSH_KEYS = 1024
"""Keys that may wait before a change makes them go."""
SLICE = 1 << 14
"""Keys that one call sends at most: the rest goes with the next calls, so that no caller waits for long."""
LOOKUP_KEYS = 4096
SWEEP_KEYS = 2048
ATTEMPTS = 4
"""Attempts at a prompt of several slices, during which the directory may change."""


Write: TypeAlias = tuple[str, bytes, bytes, bytes]
"""The owner, the operation (as the script names it), the place or stream it is about, and keys or text."""

CALL_KEYS = 1024
"""Keys per script call: some milliseconds, in which the server serves no other client."""
CALL_WRITES = 256
CALLS = 8
"""Script calls per round trip."""


class PendingWrites:
    """Writes on their way to the server, in order, packed as the server's script takes them.

    Bounded by what the mirror holds: while the server is away nothing waits here at all, because afterwards everything is
    written again.
    """

    def __init__(self) -> None:
        self.keys = 0
        """Number of waiting keys; a write without keys counts as one."""
        self._writes: deque[Write] = deque()

    def __len__(self) -> int:
        return len(self._writes)

    def put(self, owner: str, operation: bytes, name: bytes, text: bytes = b"") -> None:
        self._writes.append((owner, operation, name, text))
        self.keys += _weight(text)

    def put_keys(self, owner: str, operation: bytes, name: bytes, keys: Sequence[int]) -> None:
        """Add a write of keys, each of which is listed once."""
        text = packed("Q", keys)
        for low in range(0, len(text), CALL_KEYS * 8):
            self.put(owner, operation, name, text[low : low + CALL_KEYS * 8])

    def take(self) -> list[tuple[str, list[bytes]]]:
        """Return the next round trip's calls: (owner, arguments). They are gone from here."""
        calls: list[tuple[str, list[bytes]]] = []
        room = writes = 0
        while self._writes:
            owner, *arguments = self._writes[0]
            weight = _weight(arguments[-1])
            if not calls or calls[-1][0] != owner or room < weight or writes >= CALL_WRITES:
                if len(calls) == CALLS:
                    break
                calls.append((owner, []))
                room, writes = CALL_KEYS, 0
            self._writes.popleft()
            self.keys -= weight
            room -= weight
            writes += 1
            calls[-1][1].extend(arguments)
        return calls

    def owners(self) -> set[str]:
        """Return the owners with waiting writes."""
        return {write[0] for write in self._writes}

    def drop(self, owner: str | None) -> None:
        """Discard waiting writes of ``owner``, of all with ``None``."""
        self._writes = deque(write for write in self._writes if owner is not None and write[0] != owner)
        self.keys = sum(_weight(text) for *_, text in self._writes)


def unpack(text: bytes) -> int:
    """Return one key."""
    return int.from_bytes(text, "little")


def _weight(text: bytes) -> int:
    return len(text) // 8 or 1


class RedisIndex:
    """A ``IndexBackend``. Not for several threads at once.

    By itself it is the only writer of its namespace and knows places by their numbers. With ``places``, which have names, any
    number of processes share the index, each writing for the owners it has leases of: see ``SharedIndexer``.
    """

    def __init__(
        self,
        url: str = "redis://127.0.0.1:6379/0",
        *,
        namespace: str = "default",
        replica: str | None = None,
        lease: float = 3.0,
        timeout: float = 0.5,
        backoff: float = 2.0,
        budget: int | None = None,
        places: Places | None = None,
        identity: str = "",
        clock: Clock | None = None,
    ) -> None:
        """Connect to the server at ``url`` (``redis``, ``rediss``, ``unix``, ``valkey`` or ``valkeys``).

        ``namespace`` sets indexes on one server apart. ``replica`` names this process and must be unlike any other's. ``lease``
        seconds after its last sign of life a writer is given up. Each answer of the server is waited for ``timeout`` seconds;
        after a failure it is left alone for up to ``backoff``. ``budget`` bytes bound the mirror, and with it this process's
        share of the server. ``identity`` names everything that keys depend on. Raises ``KvyardError`` if the server can't
        be reached or used, or the namespace has an index of another identity; later failures set ``reason``.
        """
        if min(lease, timeout, backoff) <= 0:
            raise KvyardError("lease, timeout and backoff of a Redis index must be more than 0 seconds")
        self.clock = clock or WallClock()
        self.blind_lookups = 0
        """Lookups answered with nothing because the server was away or its state changed meanwhile."""
        self.announced = 0
        """Number of times that all rows of an owner were written."""
        self.unsent_keys = 0
        """Changes that weren't sent because the server was away or another process had the lease; the mirror has them."""
        self.directory = Directory(places)
        self.mirror = MemoryIndex(budget=budget, forgotten=lambda place, keys: self._forgotten.append((place, keys)))
        self.pending = PendingWrites()
        self.acquired: Callable[[str], None] = lambda owner: None
        """Called when an owner's lease was got and its rows wait to be sent: for what else there is to write."""
        self._forgotten: list[tuple[int, Sequence[int]]] = []
        self._is_solo = places is None
        self._sweeping = False
        self.server = Server(url, timeout=timeout, backoff=from_seconds(backoff), clock=self.clock)
        self.session = ReplicaSession(
            server=self.server,
            directory=self.directory,
            namespace=namespace,
            replica=replica or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}",
            identity=f"{'one writer' if self._is_solo else 'shared'} {identity}".strip(),
            lease=from_seconds(lease),
            clock=self.clock,
            acquired=self._write_all,
            lost=self.pending.drop,
        )
        if self._is_solo:
            self.session.want(SOLO)
        self.session.ready()

    def close(self) -> None:
        """Send what waits, give the leases back and disconnect. The next use connects again."""
        with suppress(Unavailable):
            if self.server.connected:
                self._send(None)
                self.session.release()
        self.server.close()
        self.session.lose_all()

    # -- changes ----------------------------------------------------------------------------------------------------

    def store(self, place: int, keys: Sequence[int], parent: int | None = None) -> Sequence[int]:
        """See ``IndexBackend``."""
        repeated = self.mirror.store(place, keys, parent)
        if len(repeated) < len(keys):
            fresh = keys
            if repeated:
                fresh = list(dict.fromkeys(keys))
                if len(fresh) == len(keys):
                    known = set(repeated)
                    fresh = [key for key in keys if key not in known]
            self._write(place, b"s", fresh)
        # After it: a store that is larger than the budget evicts part of itself.
        for where, gone in self._forgotten:
            self._write(where, b"d", gone)
        self._forgotten.clear()
        self._flush_many()
        return repeated

    def remove(self, place: int, keys: Sequence[int]) -> int:
        """See ``IndexBackend``."""
        removed = self.mirror.remove(place, keys)
        if removed:
            self._write(place, b"d", list(dict.fromkeys(keys)))
        self._flush_many()
        return removed

    def clear(self, place: int) -> int:
        """See ``IndexBackend``. On the server it takes effect at once; what its keys take is given back bit by bit."""
        removed = self.mirror.clear(place)
        if removed:
            self._write(place, b"c", ())
            self._sweeping = True
        return removed

    def publish(self, owner: str, name: bytes, text: bytes | None, *, loud: bool = True) -> None:
        """Let the others know something about ``owner``, after all changes so far; ``None`` takes it back.

        ``loud``: it changes what rows are worth, so that no replica answers without it.
        """
        if owner in self.session.tokens:
            self.pending.put(owner, b"f" if text is None else b"y" if loud else b"h", name, text or b"")

    def flush(self) -> bool:
        """Send what waits, up to a limit. Returns whether all is there and ours. Raises nothing."""
        try:
            self._catch_up()
        except Unavailable:
            return False
        return not self.pending and self.session.tokens.keys() >= self.session.wanted.keys()

    def look(self) -> None:
        """Read what others wrote, when that is due. Raises nothing."""
        with suppress(Unavailable):
            self._catch_up()
            self.session.look()

    def tick(self) -> None:
        """Do what is due: renew leases, get those that are free, send, look at what others say, tidy up. Raises nothing."""
        self.look()
        with suppress(Unavailable):
            self._sweep(SWEEP_KEYS)
            self.session.purge()

    @property
    def due(self) -> int:
        """Return the time at which ``tick`` has something to do, on ``clock``."""
        busy = self.server.connected and (self.pending or self._sweeping)
        return self.clock.now() if busy else self.session.due

    # -- questions --------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[int], through_holes: bool = False) -> Rows:
        """See ``IndexBackend``. Finds nothing while the server is away, and none of our rows until all of them were written."""
        if not keys:
            return []
        if self.mirror.budget is not None:
            self.mirror.lookup(keys)  # recency
        try:
            self._catch_up()
            return self._ask(keys, through_holes)
        except Unavailable:
            self.blind_lookups += 1
            return []

    def holds(self, place: int, key: int) -> bool:
        """See ``IndexBackend``."""
        if self.directory.name(place)[0] in self.session.wanted:
            return self.mirror.holds(place, key)
        return any(mask >> place & 1 for _, mask in self.lookup([key]))

    def held(self, place: int) -> Iterator[Sequence[int]]:
        """See ``IndexBackend``. What others write comes key by key, in no order. Raises ``Unavailable``."""
        if self.directory.name(place)[0] in self.session.wanted:
            yield from self.mirror.held(place)
            return
        self.session.ready()
        self.session.look(now=True)
        named = self.directory.name(place)
        slot = next((slot for slot, known in self.directory.slots.items() if known == named), None)
        if slot is not None:
            for member in self.session.scan(("SSCAN", f"kvy:{self.session.epoch}:p{slot}")):
                yield [unpack(member)]

    def usage(self) -> Usage:
        """See ``IndexBackend``. Blocks are those of all writers, the rest this process's own. Tidies up first."""
        usage = self.mirror.usage()
        usage.blocks = 0
        with suppress(Unavailable):
            self._catch_up()
            self._sweep(1 << 16)
            usage.blocks = int(self.session.command("GET", "rows") or 0)
        return usage

    @property
    def reason(self) -> str:
        """Why the index can't be used now; empty if it can."""
        if not self.server.connected:
            return f"the index server {self.server.address} can't be used: {self.server.reason}"
        if self._is_solo and SOLO not in self.session.tokens:
            other = self.directory.owners.get(SOLO)
            return f"another process{f' ({other.replica})' if other is not None else ''} writes to this index"
        return ""

    def check_integrity(self) -> None:
        """See ``IndexBackend``. Compares every row with every slot's set, and both with the mirror: reads all there is.

        A server that is away agrees.
        """
        self.mirror.check_integrity()
        if not self.flush():
            return
        session, directory, mirror = self.session, self.directory, self.mirror
        session.look(now=True)
        rows: dict[bytes, bytes] = _values(session, "r", "GET")
        sets = {int(slot): set(keys) for slot, keys in _values(session, ":p", "SMEMBERS").items()}
        slots = {int(slot) for slot in session.command("HKEYS", "dir")}
        retired = {int(slot) for slot in session.command("SMEMBERS", "retired")}
        free = {int(slot) for slot in session.command("SMEMBERS", "free")}
        used = int(session.command("GET", "next") or 0)
        assert not slots & retired and not (slots | retired) & free, "a slot is given out and free"
        assert slots | retired | free == set(range(used)), "a slot is lost"
        assert sets.keys() <= slots | retired, "a free slot holds something"
        for key, row in rows.items():
            assert row.strip(b"\0"), "a row of no slot"
            last = len(row) * 8 - 1
            held = {last - bit for bit in bits(int.from_bytes(row, "big"))}
            assert held == {slot for slot, keys in sets.items() if key in keys}, (
                f"row {unpack(key)} and the sets differ"
            )
        counted = int(session.command("GET", "rows") or 0)
        assert counted == len(rows), f"{counted} rows are counted but {len(rows)} are there"
        assert set().union(*sets.values()) == rows.keys(), "a set has a key without a row"
        here = {directory.name(place): {key for run in mirror.held(place) for key in run} for place in mirror.holding()}
        there = {known: {unpack(key) for key in sets.get(slot, ())} for slot, known in directory.slots.items()}
        for known in here.keys() | there.keys():
            if known[0] in session.tokens:
                mine, its = here.get(known, set()), there.get(known, set())
                assert mine == its, f"{known}: the server has {len(its)} keys, the mirror {len(mine)}"

    # -- owners -----------------------------------------------------------------------------------------------------

    def disown(self, owner: str) -> None:
        """Write for ``owner`` no more, and remove what we wrote. Raises nothing."""
        self.session.wanted.pop(owner, None)
        token = self.session.tokens.pop(owner, None)
        self.pending.drop(owner)
        if token is not None:
            self.reap(owner, token)

    def reap(self, owner: str, token: int | str = "") -> None:
        """Remove what is left of an owner, if no replica has its lease, or we do by ``token``. Raises nothing."""
        with suppress(Unavailable):
            self.session.ready()
            self.session.call(scripts.DROP, owner, token)
            self._sweeping = True

    # -- inside -----------------------------------------------------------------------------------------------------

    def _flush_many(self) -> None:
        if self.pending.keys >= FLUSH_KEYS:
            self.flush()

    def _catch_up(self) -> None:
        """Be connected with leases renewed, and send some of what waits. Raises ``Unavailable``."""
        self.session.ready()
        self._send(SLICE)

    def _write(self, place: int, operation: bytes, keys: Sequence[int]) -> None:
        owner, name = self.directory.name(place)
        if owner not in self.session.tokens:
            self.unsent_keys += len(keys) or 1
        elif operation == b"c":
            self.pending.put(owner, operation, name)
        else:
            self.pending.put_keys(owner, operation, name, keys)

    def _write_all(self, owner: str) -> None:
        """The lease of ``owner`` is new and the server knows nothing of it."""
        self._sweeping = True
        self.pending.drop(owner)
        for place in self.mirror.holding():
            whose, name = self.directory.name(place)
            if whose == owner:
                for run in self.mirror.held(place):
                    self.pending.put_keys(owner, b"s", name, run)
        self.announced += 1
        self.acquired(owner)

    def _send(self, most: int | None) -> None:
        """Send what waits, up to about ``most`` keys. Raises ``Unavailable``."""
        tokens = self.session.tokens
        sent = 0
        while self.pending and (most is None or sent < most):
            before = self.pending.keys
            calls = [(owner, tokens[owner], *args) for owner, args in self.pending.take() if owner in tokens]
            for call, reply in zip(calls, self.session.calls(scripts.WRITE, calls) if calls else (), strict=True):
                if reply[0] == b"fenced":
                    self.session.lose(str(call[0]))
            sent += before - self.pending.keys

    def _ask(self, keys: Sequence[int], through_holes: bool) -> Rows:
        for _ in range(ATTEMPTS):
            self.session.look()
            rows: list[tuple[int, bytes]] = []
            for low in range(0, len(keys), LOOKUP_KEYS):
                part = keys[low : low + LOOKUP_KEYS]
                asked = self.clock.now()
                reply = self.session.call(scripts.LOOKUP, self.directory.version, packed("Q", part), int(through_holes))
                if reply[1]:
                    self.session.take(reply[1], asked)
                    if low:
                        break  # what was found so far may mean something else by now
                rows += [(low + stop, row) for stop, row in zip(reply[2::2], reply[3::2], strict=True)]
                if not through_holes and (not rows or rows[-1][0] < low + len(part)):
                    return self._translated(rows, through_holes)
            else:
                return self._translated(rows, through_holes)
        self.blind_lookups += 1
        return []

    def _translated(self, pairs: list[tuple[int, bytes]], through_holes: bool) -> Rows:
        if self._is_solo and SOLO not in self.session.tokens:
            return []  # bare numbers of another process mean nothing here
        # Changes that the server hasn't all received are left out.
        translate = self.directory.translator(self.pending.owners() & self.session.tokens.keys())
        rows = joined((stop, translate(row)) for stop, row in pairs)
        return rows if through_holes else list(takewhile(lambda row: row[1], rows))

    def _sweep(self, most: int) -> None:
        """Give back what retired slots take, up to about ``most`` keys."""
        while self._sweeping and most > 0:
            self._sweeping = self.session.call(scripts.SWEEP, min(most, SWEEP_KEYS))[1] > 0
            most -= SWEEP_KEYS


def _values(session: ReplicaSession, kind: str, command: str) -> dict[bytes, Any]:
    """Return the values of all keys of a kind, by the rest of their names."""
    prefix = f"kvy:{session.epoch}{kind}".encode()
    names = sorted(key for key in session.scan(("SCAN",), "MATCH", prefix + b"*") if key.startswith(prefix))
    values = session.server.commands([(command, name) for name in names]) if names else []
    return {name[len(prefix) :]: value for name, value in zip(names, values, strict=True)}
