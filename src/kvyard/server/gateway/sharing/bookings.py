"""Bookings that are shared: messages about each request in flight here, and those of others.

A derived class sends them: through a server to other gateways, or to other processes of this one.
"""

import itertools

from kvyard.clock import Clock
from kvyard.index import Holder
from kvyard.router import Router, RouteRequest
from kvyard.server.gateway.sharing.peers import Peers, SharingCounters, Told, packed


class SharedBookings:
    """One part of the common view of a pool of workers. For one event loop."""

    def __init__(self, books: Router, clock: Clock, max_blocks: int) -> None:
        """``clock`` is the books' time. At most ``max_blocks`` of a prompt are sent."""
        self.counters = SharingCounters()
        self.reason = ""
        """Reason why nothing is received from others; empty if they are connected."""
        self._max_blocks = max_blocks
        self._numbers = itertools.count(1)
        self._mine: dict[object, tuple[int, Told]] = {}
        """By request id: its number, and its booking for a member that joins."""
        self._peers = Peers(books, clock, self.counters)

    @property
    def connected(self) -> bool:
        """Return true if the others are connected."""
        return not self.reason

    @property
    def peers(self) -> dict[str, int]:
        """Return the others, each with its number of requests in flight."""
        return self._peers.counts()

    async def start(self) -> None:
        """Meet the other gateways. Raises ``KvyardError`` for trouble that waiting doesn't mend."""

    async def run(self) -> None:
        """Share until cancelled, where that takes a task."""

    async def close(self) -> None:
        """Leave, where ``run`` was never called."""

    def elsewhere(self, name: str) -> int:
        """Return requests of others at an engine that count for how many it may have."""
        return 0

    # -- what happens here ------------------------------------------------------------------------------------------

    def routed(self, request: RouteRequest, worker: Holder, new_tokens: int) -> None:
        """Announce a request that was routed to ``worker``, which has ``new_tokens`` of it to compute."""
        if request.id in self._mine:
            self.finished(request.id)
        number = next(self._numbers)
        booking = (worker.name, worker.rank, request.num_tokens, new_tokens, packed(request.keys[: self._max_blocks]))
        self._mine[request.id] = (number, booking)
        self._tell(number, booking)

    def prefill_done(self, id_: object) -> None:
        """Announce that the prompt of a request is computed."""
        known = self._mine.get(id_)
        if known is not None and known[1][3]:
            number, (name, rank, tokens, _, keys) = known
            self._mine[id_] = (number, (name, rank, tokens, 0, keys))
            self._tell(number, True)

    def finished(self, id_: object) -> None:
        """Announce that a request ended, for any reason."""
        known = self._mine.pop(id_, None)
        if known is not None:
            self._tell(known[0], False)

    def worker_added(self, worker: Holder) -> None:
        """Count from now on what other gateways have at ``worker``, which was just added."""
        self._peers.worker_added(worker)

    def _tell(self, number: int, change: Told | bool) -> None:
        """Tell the others of a request: what it is, ``True`` at its first token, ``False`` at its end."""
        raise NotImplementedError
