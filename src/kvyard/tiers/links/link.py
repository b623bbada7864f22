"""A link: both directions of a medium with finite bandwidth; its transfers, and the account of each direction.

The class here keeps the time, the transfers in flight and the account. The disciplines ``fair`` and ``fifo``, which derive
from it, share the bandwidth.

A forecast is made on a copy of a link. Where this is compiled, classes can be copied if ``mypyc_attr`` says so, and then
they must also allow interpreted subclasses: without that mypyc leaves out ``__init__``.
"""

import copy
from abc import abstractmethod
from enum import IntEnum
from operator import attrgetter, index
from typing import Any, Generic, Self, TypeAlias, TypeVar

from mypy_extensions import mypyc_attr

from kvyard.clock import SECOND, ClockError
from kvyard.errors import KvyardError
from kvyard.integers import ceil_div
from kvyard.tiers.links.config import LinkConfig
from kvyard.tiers.links.stats import LaneStats


class LinkError(KvyardError, ValueError):
    """A link was asked for something that can't be, such as a negative number of bytes."""


class Direction(IntEnum):
    """Seen from the compute; between two workers, from the first of them."""

    OUT = 0
    """Away from it: device to host, host to storage; writes."""
    IN = 1
    """Towards it: storage to host, host to device; loads."""


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class Transfer:
    """One submission on a link. The link makes it and alone changes it; two are the same only if they are one object."""

    def __init__(
        self, number: int, direction: Direction, client: str, nbytes: int, pieces: int, submitted: int, started: int
    ) -> None:
        self.number = number
        """Counts up from 0 on each link, in order of submission."""
        self.direction = direction
        self.client = client
        self.nbytes = nbytes
        self.pieces = pieces
        """Separate copies that it is made of; each costs the link its overhead."""
        self.submitted = submitted
        self.started: int | None = started
        """Time at which its first byte can move. Known from submission on; ``None`` if cancelled before."""
        self.ended: int | None = None
        """Time at which its last byte had moved, or it was cancelled. ``None`` until then."""
        self.cancelled = False
        self.queued = 0
        """Nanoseconds that other transfers cost it: how much later it landed than it would have on an idle link."""

    def __repr__(self) -> str:
        state = "in flight" if self.ended is None else f"{'cancelled' if self.cancelled else 'landed'} at {self.ended}"
        return (
            f"<{type(self).__name__} {self.number} {self.direction.name} {self.nbytes} B of {self.client!r}, {state}>"
        )


class LaneAccount:
    """Totals of one direction so far; see ``LaneStats``."""

    __slots__ = ("bytes", "cancelled", "landed", "queued_ns", "submitted")

    def __init__(self) -> None:
        self.submitted = 0
        self.landed = 0
        self.cancelled = 0
        self.bytes = 0
        self.queued_ns = 0


T = TypeVar("T", bound=Transfer)


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class LinkBase(Generic[T]):
    """Base of links. Times are integer nanoseconds and never go back. Every verb that takes ``now`` raises ``ClockError``
    for one earlier than the latest, and changes nothing then.
    """

    def __init__(self, config: LinkConfig, kind: type[T]) -> None:
        """``kind`` is what a discipline makes of a submission."""
        self.config = config
        self._kind = kind
        self._now = 0
        self._number = 0
        self._live: dict[int, T] = {}
        self._landed: list[Transfer] = []
        self._accounts = (LaneAccount(), LaneAccount())
        self._left_out = (0, 0)
        """Busy nanoseconds of each direction that don't count."""
        self._first_bytes = tuple(lane.first_byte_ns for lane in config.lanes)
        self._overheads = tuple(lane.piece_overhead for lane in config.lanes)
        # The speed of a transfer that has the link to itself.
        self._alone = tuple(
            min(
                (limit for limit in (lane.bandwidth, lane.client_bandwidth, config.duplex_bandwidth) if limit),
                default=None,
            )
            for lane in config.lanes
        )

    def submit(self, now: int, direction: Direction | int, nbytes: int, client: str = "", pieces: int = 1) -> Transfer:
        """Queue ``nbytes``, made of ``pieces`` separate copies.

        Raises ``LinkError`` for amounts that can't be, and changes nothing then. A transfer of 0 bytes lands when its first
        byte could have moved.
        """
        if not isinstance(direction, Direction) and direction not in (0, 1):
            raise LinkError(f"direction must be Direction.OUT or Direction.IN, got {direction!r}")
        way = direction if isinstance(direction, Direction) else Direction(direction)
        nbytes, pieces = index(nbytes), index(pieces)
        if nbytes < 0:
            raise LinkError(f"nbytes must not be negative, got {nbytes}")
        if pieces < 1:
            raise LinkError(f"pieces must be 1 or more, got {pieces}")
        now = self._advance(now)
        first_byte = now + self._first_bytes[way]
        number = self._number
        self._live[number] = transfer = self._kind(number, way, client, nbytes, pieces, now, first_byte)
        self._number = number + 1
        self._accounts[way].submitted += 1
        self._queue(transfer, first_byte)
        return transfer

    def cancel(self, now: int, transfer: Transfer) -> bool:
        """Give ``transfer`` up: it ends at ``now``, and ``advance`` won't report it.

        Returns whether there was anything to give up: one that landed at or before ``now`` stays landed (and is reported),
        one that was cancelled stays cancelled. Raises ``LinkError`` for a transfer of another link.
        """
        mine = self._live.get(transfer.number)
        if mine is not transfer and transfer.ended is None:
            raise LinkError(f"{transfer} is not a transfer of this link")
        now = self._advance(now)
        if mine is None or mine.ended is not None:
            return False
        self._drop(mine)
        mine.cancelled = True
        mine.ended = now
        if mine.started is not None and mine.started > now:
            mine.started = None
        del self._live[mine.number]
        self._accounts[mine.direction].cancelled += 1
        return True

    @abstractmethod
    def earliest(self) -> int | None:
        """Return the time of the next landing if nothing else is submitted or cancelled; ``None`` if there is none.

        If some have landed that ``advance`` hasn't reported yet, the link's current time: they are due at once.
        """

    def advance(self, now: int) -> list[Transfer]:
        """Let time pass up to ``now``, and return what landed since the last call, by ``(ended, number)``."""
        self._advance(now)
        landed = self._landed
        if landed:
            self._landed = []
            if len(landed) > 1:
                landed.sort(key=attrgetter("ended", "number"))
        return landed

    def foresee(self, now: int, direction: Direction, nbytes: int, client: str = "", pieces: int = 1) -> int:
        """Return the time at which this transfer would land, submitted at ``now`` or at the link's time, if that is later,
        and nothing after it. Changes nothing. Takes time by the transfers in flight.
        """
        trial = self._trial()
        return trial._landing(trial.submit(max(now, self._now), direction, nbytes, client, pieces))

    def foresee_landing(self, transfer: Transfer) -> int:
        """Return the time at which ``transfer``, which is in flight, lands if nothing else is submitted. Changes nothing."""
        trial = self._trial()
        return trial._landing(trial._live[transfer.number])

    def _trial(self) -> Self:
        """Return a copy to try things on."""
        return copy.deepcopy(self, {id(part): part for part in self._constants()})

    def _constants(self) -> list[object]:
        """Return the objects that a copy may share with this."""
        return [self.config]

    def _landing(self, transfer: Transfer) -> int:
        while transfer.ended is None:
            time = self.earliest()
            assert time is not None, f"{transfer} never lands"
            self.advance(time)
        return transfer.ended

    def stats(self, direction: Direction) -> LaneStats:
        """Return the account of one direction, up to the last ``now``."""
        account = self._accounts[direction]
        return LaneStats(
            submitted=account.submitted,
            landed=account.landed,
            cancelled=account.cancelled,
            bytes=account.bytes,
            busy_ns=self._busy_ns(direction) - self._left_out[direction],
            queued_ns=account.queued_ns,
        )

    @property
    def accounts(self) -> tuple[LaneAccount, LaneAccount]:
        """Return the totals of each direction so far."""
        return self._accounts

    def leave_out_busy(self) -> None:
        """Count busy time from now on."""
        self._left_out = (self._busy_ns(Direction.OUT), self._busy_ns(Direction.IN))

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless the link's state is consistent and its shares keep I7. Slow."""
        for way in Direction:
            account = self._accounts[way]
            live = sum(transfer.direction == way for transfer in self._live.values())
            assert account.submitted == account.landed + account.cancelled + live, f"{way.name}: a transfer is lost"
        for number, transfer in self._live.items():
            assert transfer.number == number, f"{transfer} is filed as {number}"
            assert transfer.ended is None, f"{transfer} has ended and is still in flight"
        for landed in self._landed:
            assert landed.ended is not None, f"{landed} is reported and in flight"
            assert landed.ended <= self._now, f"{landed} landed in the future"

    # -- what a discipline adds ---------------------------------------------------------------------------------------

    @abstractmethod
    def _run(self, now: int) -> None:
        """Let everything start and land that does so by ``now``, in its order."""

    @abstractmethod
    def _queue(self, transfer: T, first_byte: int) -> None:
        """Take in a transfer whose first byte can move at ``first_byte`` on an idle link."""

    @abstractmethod
    def _drop(self, transfer: T) -> None:
        """Take out a transfer that is cancelled."""

    @abstractmethod
    def _busy_ns(self, direction: Direction) -> int:
        """Return for how long anything moved."""

    # -- what it is given ---------------------------------------------------------------------------------------------

    def _advance(self, now: int) -> int:
        now = index(now)  # a float would make the arithmetic inexact, one of numpy's integers would overflow
        if now < self._now:
            raise ClockError(f"time doesn't run backwards: the link is at {self._now} ns, not {now} ns")
        self._now = now
        self._run(now)
        return now

    def _load(self, transfer: T) -> int:
        """Return its load on the link, in bytes: its payload, and the overhead of its pieces."""
        return transfer.nbytes + transfer.pieces * self._overheads[transfer.direction]

    def _alone_ns(self, transfer: T) -> int:
        """Return its duration on an idle link."""
        alone = self._alone[transfer.direction]
        return 0 if alone is None else ceil_div(self._load(transfer) * SECOND, alone)

    def _land(self, transfer: T, ended: int, queued: int) -> None:
        transfer.ended = ended
        transfer.queued = queued
        del self._live[transfer.number]
        account = self._accounts[transfer.direction]
        account.landed += 1
        account.bytes += transfer.nbytes
        account.queued_ns += queued
        self._landed.append(transfer)


Link: TypeAlias = LinkBase[Any]
