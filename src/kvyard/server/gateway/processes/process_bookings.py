"""Load shared between the processes of one gateway, by their channel.

Each sends its bookings within ``DELAY`` seconds, and every ``STATED`` seconds a list of all its requests in flight, so that
nothing that got lost on the way stays booked. The hub reports which process has ended; its requests in flight are gone at
once.
"""

import asyncio
from collections.abc import Callable, Mapping

import msgspec

from kvyard.clock import Clock, pause
from kvyard.router import Router
from kvyard.server.gateway.processes.channel import Channel, encode
from kvyard.server.gateway.processes.frames import ALL, FrameKind
from kvyard.server.gateway.sharing import SharedBookings
from kvyard.server.gateway.sharing.peers import Told

DELAY = 0.005
"""Seconds that bookings wait for more, so that a frame has several."""
STATED = 5.0
"""Seconds between two full statements of in-flight requests."""
LOOK = 0.25
"""Seconds between two looks whether something got lost."""
PORTION = 64
"""Bookings in a frame of a full statement."""
MAX_BLOCKS = 4096
"""Blocks of a prompt that others receive."""

Changes = list[tuple[int, Told | bool]]
_decode = msgspec.msgpack.Decoder(tuple[str, Changes | None, list[int] | None]).decode
"""A pool, changes in it, and the numbers of all requests in flight there; without either: a request for all of it."""


class PoolBookings(SharedBookings):
    """One pool's."""

    def __init__(
        self, books: Router, clock: Clock, tell: Callable[[int, Told | bool], None], others: Mapping[str, str]
    ) -> None:
        """``others`` are the processes that are there."""
        super().__init__(books, clock, MAX_BLOCKS)
        self._told = tell
        self._peers.meet(others)

    def on_changed(self, changed: Callable[[str], None]) -> None:
        """Have ``changed`` called with the name of each engine at which others have more, or less."""
        self._peers.changed = changed

    def elsewhere(self, name: str) -> int:
        return self._peers.at.get(name, 0)

    def meet(self, others: Mapping[str, str]) -> None:
        """Learn which processes exist."""
        self._peers.meet(others)

    def hear(self, who: str, changes: Changes) -> None:
        """Book requests of another process."""
        self._peers.hear(who, changes)

    def keep_only(self, who: str, numbers: list[int]) -> None:
        """Keep only these requests of another process."""
        self._peers.keep_only(who, frozenset(numbers))

    def all_told(self) -> Changes:
        """Return the bookings of all requests in flight here."""
        return list(self._mine.values())

    def _tell(self, number: int, change: Told | bool) -> None:
        self._told(number, change)


class ProcessBookings:
    """Bookings of all pools of a process."""

    def __init__(self, channel: Channel, clock: Clock) -> None:
        self._channel = channel
        self._clock = clock
        self._pools: dict[str, PoolBookings] = {}
        self._others: dict[str, str] = {}
        """The other processes, each with how many had its number before."""
        self._joined = 0
        self._outbox: dict[str, Changes] = {}
        channel.heard[FrameKind.BOOKINGS] = self._heard
        channel.heard[FrameKind.JOINED] = self._met
        channel.heard[FrameKind.GONE] = self._parted
        channel.heard[FrameKind.RESTATE] = lambda _, body: self._tell_all(body[0])

    def make(self, pool: str, books: Router) -> PoolBookings:
        """Share the bookings of one more pool; what others have there is asked of them."""

        def tell(number: int, change: Told | bool) -> None:
            if not self._outbox:
                asyncio.get_running_loop().call_later(DELAY, self.flush)
            self._outbox.setdefault(pool, []).append((number, change))

        bookings = self._pools[pool] = PoolBookings(books, self._clock, tell, self._others)
        self._send(ALL, pool, None, None)
        return bookings

    def flush(self) -> None:
        """Tell what waits."""
        outbox, self._outbox = self._outbox, {}
        for pool, changes in outbox.items():
            self._send(ALL, pool, changes, None)

    async def run(self) -> None:
        """Exchange bookings until cancelled."""
        since = 0.0
        while True:
            await pause(LOOK)
            since += LOOK
            if self._channel.lost_frames and self._channel.drained:
                self._channel.lost_frames = 0
                self._tell_all(ALL)
            elif since >= STATED:
                since = 0.0
                self.flush()
                for pool in self._pools:
                    self._state(ALL, pool)

    def _tell_all(self, peer: int) -> None:
        self.flush()
        for pool in self._pools:
            self._tell_pool(peer, pool)

    def _tell_pool(self, peer: int, pool: str) -> None:
        bookings = self._pools[pool].all_told()
        for start in range(0, len(bookings), PORTION):
            self._send(peer, pool, bookings[start : start + PORTION], None)
        self._state(peer, pool)

    def _state(self, peer: int, pool: str) -> None:
        self._send(peer, pool, None, [number for number, _ in self._pools[pool].all_told()])

    def _send(self, peer: int, pool: str, changes: Changes | None, numbers: list[int] | None) -> None:
        self._channel.send(FrameKind.BOOKINGS, peer, encode((pool, changes, numbers)))

    # -- hearing --------------------------------------------------------------------------------------------------------

    def _heard(self, peer: int, body: bytes) -> None:
        name, changes, numbers = _decode(body)
        pool = self._pools.get(name)
        if pool is None:
            return  # its engines aren't known here yet; once they are, all is asked for
        if changes is not None:
            pool.hear(str(peer), changes)
        elif numbers is not None:
            pool.keep_only(str(peer), numbers)
        else:
            self.flush()
            self._tell_pool(peer, name)

    def _met(self, _: int, body: bytes) -> None:
        self._joined += 1
        self._others[str(body[0])] = str(self._joined)
        self._meet()

    def _parted(self, _: int, body: bytes) -> None:
        self._others.pop(str(body[0]), None)
        self._meet()

    def _meet(self) -> None:
        for pool in self._pools.values():
            pool.meet(self._others)
