"""What all disciplines keep: the time, the numbers of transfers, who is under way, what landed, and the account.

A ledger knows nothing of how bandwidth is shared.
"""

from __future__ import annotations

from operator import attrgetter, index
from typing import Generic, TypeVar

from kvyard.clock import SECOND, ClockError
from kvyard.errors import KvyardError
from kvyard.tiers.links.config import LinkConfig
from kvyard.tiers.links.transfer import Direction, LaneStats, Transfer

T = TypeVar("T", bound=Transfer)

_BY_END = attrgetter("ended", "number")
_DIRECTIONS = (Direction.OUT, Direction.IN)


class LinkError(KvyardError, ValueError):
    """A link was asked for something that can't be, such as a negative number of bytes."""


class LinkBase(Generic[T]):
    """The base of a discipline, whose kind of transfer is ``make``."""

    def __init__(self, config: LinkConfig, make: type[T]) -> None:
        self.config = config
        self._make = make
        self._now = 0
        self._number = 0
        self._live: dict[int, T] = {}
        self._landed: list[Transfer] = []
        self._accounts = (LaneStats(), LaneStats())
        self._latency = tuple(lane.first_byte_ns for lane in config.lanes)
        self._overhead = tuple(lane.piece_overhead for lane in config.lanes)
        # The speed of a transfer that has the link to itself.
        self._alone = tuple(
            min(
                (
                    limit
                    for limit in (lane.bandwidth, lane.client_bandwidth, config.duplex_bandwidth)
                    if limit is not None
                ),
                default=None,
            )
            for lane in config.lanes
        )

    def _told(self, now: int) -> int:
        """Take note of the time."""
        now = index(now)  # a float would make the arithmetic inexact, one of numpy's integers would overflow
        if now < self._now:
            raise self._backwards(now)
        self._now = now
        return now

    def _check(self, now: int, direction: int, nbytes: int, pieces: int) -> None:
        """Raise unless a submission may be made, before anything is changed."""
        if index(now) < self._now:
            raise self._backwards(now)
        if direction not in (0, 1):
            raise LinkError(f"direction must be Direction.OUT or Direction.IN, got {direction!r}")
        if index(nbytes) < 0:
            raise LinkError(f"nbytes must not be negative, got {nbytes}")
        if index(pieces) < 1:
            raise LinkError(f"pieces must be 1 or more, got {pieces}")

    def _admit(self, now: int, direction: int, nbytes: int, client: str, pieces: int) -> T:
        """Enter a transfer in the books. Its ``started`` is when the first byte could move on an idle link."""
        now = index(now)
        way = _DIRECTIONS[direction]
        transfer = self._make(self._number, way, client, index(nbytes), index(pieces), now)
        transfer.started = now + self._latency[way]
        self._live[self._number] = transfer
        self._number += 1
        self._accounts[way].submitted += 1
        return transfer

    def _load(self, transfer: T) -> int:
        """What it puts on the link, in bytes: its payload, and the overhead of its pieces."""
        return transfer.nbytes + transfer.pieces * self._overhead[transfer.direction]

    def _alone_ns(self, transfer: T) -> int:
        """How long it would move on an idle link."""
        alone = self._alone[transfer.direction]
        return 0 if alone is None else -(-self._load(transfer) * SECOND // alone)

    def _mine(self, transfer: Transfer) -> T | None:
        """``transfer`` if it is under way, ``None`` if it has ended. Raises ``LinkError`` if it is another link's."""
        mine = self._live.get(transfer.number)
        if mine is transfer:
            return mine
        if transfer.ended is None:
            raise LinkError(f"{transfer} is not a transfer of this link")
        return None

    def _land(self, transfer: T, ended: int, queued: int) -> None:
        transfer.ended = ended
        transfer.queued = queued
        del self._live[transfer.number]
        account = self._accounts[transfer.direction]
        account.landed += 1
        account.bytes += transfer.nbytes
        account.queued_ns += queued
        self._landed.append(transfer)

    def _give_up(self, transfer: T) -> None:
        now = self._now
        transfer.cancelled = True
        transfer.ended = now
        if transfer.started is not None and transfer.started > now:
            transfer.started = None
        del self._live[transfer.number]
        self._accounts[transfer.direction].cancelled += 1

    def _collect(self) -> list[Transfer]:
        landed = self._landed
        if landed:
            self._landed = []
            if len(landed) > 1:
                landed.sort(key=_BY_END)
        return landed

    def _backwards(self, now: int) -> ClockError:
        return ClockError(f"time doesn't run backwards: the link is at {self._now} ns, not {now} ns")

    def _check_books(self) -> None:
        for way in _DIRECTIONS:
            account = self._accounts[way]
            live = sum(transfer.direction == way for transfer in self._live.values())
            assert account.submitted == account.landed + account.cancelled + live, f"{way.name}: a transfer is lost"
        for number, transfer in self._live.items():
            assert transfer.number == number, f"{transfer} is filed as {number}"
            assert transfer.ended is None, f"{transfer} has ended and is still under way"
        for landed in self._landed:
            assert landed.ended is not None, f"{landed} is reported and under way"
            assert landed.ended <= self._now, f"{landed} landed in the future"
