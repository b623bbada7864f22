"""Requests of other gateways in flight, booked here as if they had been routed here.

It receives members and their requests in the order in which they were sent, and knows no server and no wire but the
requests'. A member that joins again, or is gone, loses all its requests in flight.
"""

import sys
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

import msgspec

from kvyard.clock import Clock, pause
from kvyard.decode_errors import DECODE_ERRORS
from kvyard.errors import KvyardError
from kvyard.index import Holder
from kvyard.router import Router, RouteRequest

MOST = 1 << 16
"""Requests of one other gateway that are kept at most."""
TURN = 64
"""Requests that are booked before others have a turn on the event loop."""

Told: TypeAlias = tuple[str, int, int, int, bytes]
"""Worker, rank, tokens of the prompt, tokens still to prefill, names of its blocks."""
encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[int, Told | bool]]).decode
"""Changes by request: the booking of a new one, ``True`` for its first token, ``False`` for its end."""


class SharingCounters(msgspec.Struct):
    """Counters since the start."""

    beats: int = 0
    failures: int = 0
    """Beats that didn't reach the server, those that weren't even tried included."""
    outages: int = 0
    """Times that the server went away."""
    joins: int = 0
    """Times that everything was sent again because this gateway joined, or joined again."""
    sent: int = 0
    """Changes reported."""
    received: int = 0
    expired: int = 0
    """Requests of others that were given up with their gateway."""
    unknown_workers: int = 0
    """Requests of others at workers that aren't known here."""
    dropped: int = 0
    """Requests of others beyond what is kept."""
    garbled: int = 0
    """Messages that can't be read."""


class _Foreign(msgspec.Struct):
    """A request of another gateway."""

    request: RouteRequest
    worker: Holder
    new_tokens: int
    booked: bool = False


class _Peer(msgspec.Struct):
    """Another gateway since it joined."""

    number: str
    requests: dict[int, _Foreign] = {}


class Peers(msgspec.Struct, eq=False):
    """All other gateways that share one pool."""

    books: Router
    clock: Clock
    counters: SharingCounters
    at: dict[str, int] = {}
    """Number of their requests at each engine, by its name."""
    changed: Callable[[str], None] | None = None
    """Called with the name of an engine at which they have more, or less."""
    _peers: dict[str, _Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def counts(self) -> dict[str, int]:
        """Return the number of requests in flight of each."""
        return {name: len(peer.requests) for name, peer in self._peers.items()}

    def worker_added(self, worker: Holder) -> None:
        """Count from now on what other gateways have at ``worker``, which was just added."""
        for peer in self._peers.values():
            for entry in peer.requests.values():
                if entry.worker == worker:
                    self._book(entry)

    def meet(self, present: Mapping[str, str]) -> bool:
        """Note which gateways are present, each with the time it got its number. Returns whether any is new."""
        for name, peer in list(self._peers.items()):
            if present.get(name) != peer.number:
                self._forget(name)
        fresh = [name for name in present if name not in self._peers]
        for name in fresh:
            self._peers[name] = _Peer(present[name])
        return bool(fresh)

    async def take(self, heard: Sequence[Sequence[bytes]]) -> None:
        """Apply messages: sender, number, and content."""
        done = 0
        for name, number, payload in heard:
            try:
                changes = _decode(payload)
                who, which = name.decode(), number.decode()
            except DECODE_ERRORS:
                self.counters.garbled += 1
                continue
            for request, change in changes:
                peer = self._peers.get(who)
                if peer is None or peer.number != which:
                    break  # it is gone, or has joined again since
                self.counters.received += 1
                self._apply(who, peer, request, change)
                done += 1
                if done % TURN == 0:
                    await pause()

    def hear(self, who: str, changes: Sequence[tuple[int, Told | bool]]) -> None:
        """Apply a report of a peer that is present; ignore one of a peer that isn't."""
        peer = self._peers.get(who)
        if peer is not None:
            for request, change in changes:
                self.counters.received += 1
                self._apply(who, peer, request, change)

    def keep_only(self, who: str, numbers: Collection[int]) -> None:
        """Keep only these requests of a member; others were lost on the way, and are removed."""
        peer = self._peers.get(who)
        for number in [] if peer is None else [known for known in peer.requests if known not in numbers]:
            self.counters.expired += 1
            self._apply(who, self._peers[who], number, False)

    def _apply(self, who: str, peer: _Peer, number: int, change: Told | bool) -> None:
        known = peer.requests.get(number)
        now = self.clock.now()
        if change is True:
            if known is not None:
                known.new_tokens = 0
                if known.booked:
                    # Told a while after it came, or at the end of a whole answer: it says nothing of an engine's pace.
                    self.books.prefill_done(known.request.id, now, False)
        elif change is False:
            if known is not None:
                del peer.requests[number]
                if known.booked:
                    # With tokens still to compute it had no first token: its engine refused it, or was never reached.
                    (self.books.refused if known.new_tokens else self.books.finished)(known.request.id, now)
                self._count(known.worker.name, -1)
        elif known is None:
            if len(peer.requests) >= MOST:
                self.counters.dropped += 1
                return
            name, rank, tokens, new_tokens, keys = change
            request = RouteRequest(("@", who, number), unpacked(keys), tokens)
            entry = peer.requests[number] = _Foreign(request, Holder(name, rank), new_tokens)
            if not self._book(entry):
                self.counters.unknown_workers += 1
            self._count(name, 1)
        elif known.new_tokens and not change[3]:
            self._apply(who, peer, number, True)  # reported again, and its first token came meanwhile

    def _count(self, name: str, by: int) -> None:
        left = self.at.get(name, 0) + by
        if left:
            self.at[name] = left
        else:
            self.at.pop(name, None)
        if self.changed is not None:
            self.changed(name)

    def _book(self, entry: _Foreign) -> bool:
        if entry.booked:
            # Its worker may have gone and come back: what was booked there went with it.
            self.books.finished(entry.request.id, self.clock.now())
        try:
            self.books.book(entry.request, entry.worker, self.clock.now(), entry.new_tokens)
            entry.booked = True
        except KvyardError:
            entry.booked = False
        return entry.booked

    def _forget(self, name: str) -> None:
        """Remove a gateway that is gone, with its requests in flight."""
        now = self.clock.now()
        for entry in self._peers.pop(name).requests.values():
            self.counters.expired += 1
            if entry.booked:
                self.books.finished(entry.request.id, now)
            self._count(entry.worker.name, -1)

    def forget_all(self) -> None:
        """Forget all other gateways."""
        for name in list(self._peers):
            self._forget(name)


def size_of(change: Told | bool) -> int:
    """Return bytes that a change takes, about."""
    return 8 if isinstance(change, bool) else 64 + len(change[4])


def packed(keys: Sequence[int]) -> bytes:
    """Return names of blocks as bytes, the lowest first, whatever the machine."""
    return _little(array("Q", keys)).tobytes()


def unpacked(keys: bytes) -> "array[int]":
    """Return names of blocks that were ``packed``."""
    words = array("Q")
    words.frombytes(keys[: len(keys) // 8 * 8])
    return _little(words)


def _little(words: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        words.byteswap()
    return words
