"""A link with one lane per direction that serves one transfer after the other, in order of submission.

The landing is fixed at submission: ``max(tail of the lane, first byte) + bytes / bandwidth``. The head of a lane
holds up those behind it, and a cancelled transfer keeps its place: the lane is a queue that was handed to the hardware.
The tail is kept as a fraction of a nanosecond, so that a thousand small transfers take as long as one of their size.
"""

from collections import deque

from mypy_extensions import mypyc_attr

from kvyard.blocks.spec import ConfigError
from kvyard.clock import SECOND
from kvyard.integers import ceil_div
from kvyard.tiers.links.config import LinkConfig
from kvyard.tiers.links.link import Direction, LinkBase, Transfer


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class FifoTransfer(Transfer):
    """A transfer, and its place in the lane: from ``begin`` to ``end``, in nanoseconds times the lane's speed."""

    begin: int
    end: int
    due: int
    """Landing: ``end``, at the next whole nanosecond."""


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class FifoLane:
    """One direction."""

    def __init__(self, bandwidth: int | None) -> None:
        self.speed = 1 if bandwidth is None else bandwidth
        self.unit = 0 if bandwidth is None else SECOND  # of work that one byte is
        self.queue: deque[FifoTransfer] = deque()  # in order of landing, cancelled ones included
        self.tail = 0  # when the lane is empty, in nanoseconds times the speed
        self.worked = 0  # by those that have left the queue, in the same unit


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class FifoLink(LinkBase[FifoTransfer]):
    """See ``Link`` for the verbs. All take constant time, not counting what has landed."""

    def __init__(self, config: LinkConfig) -> None:
        for name, lane in (("outward", config.outward), ("inward", config.inward)):
            if lane.client_bandwidth is not None:
                raise ConfigError(
                    f"{name}.client_bandwidth: a fifo link serves one transfer at a time and has no caps for clients; "
                    "leave it out, or set discipline to fair"
                )
        if config.duplex_bandwidth is not None:
            raise ConfigError(
                "duplex_bandwidth: the lanes of a fifo link know nothing of each other; "
                "leave it out, or set discipline to fair"
            )
        super().__init__(config, FifoTransfer)
        self._lanes = tuple(FifoLane(lane.bandwidth) for lane in config.lanes)

    def _queue(self, ticket: FifoTransfer, first_byte: int) -> None:
        lane = self._lanes[ticket.direction]
        speed, work = lane.speed, self._load(ticket) * lane.unit
        begin = first_byte * speed
        ticket.started = first_byte
        if begin < lane.tail:
            begin = lane.tail
            ticket.started = ceil_div(begin, speed)
        ticket.begin = begin
        ticket.end = lane.tail = end = begin + work
        ticket.due = due = ceil_div(end, speed)
        ticket.queued = due - first_byte - ceil_div(work, speed)
        lane.queue.append(ticket)

    def _drop(self, ticket: FifoTransfer) -> None:
        """Drop the ticket; its place in the lane stays taken, and its bytes still pass."""
        ticket.queued = 0

    def earliest(self) -> int | None:
        """Return when the next transfer lands; see ``Link``."""
        if self._landed:
            return self._now
        soonest: int | None = None
        for lane in self._lanes:
            for ticket in lane.queue:
                if not ticket.cancelled:
                    if soonest is None or ticket.due < soonest:
                        soonest = ticket.due
                    break
        return soonest

    def _busy_ns(self, direction: Direction) -> int:
        lane = self._lanes[direction]
        work = lane.worked
        for ticket in lane.queue:
            if (sofar := self._now * lane.speed) <= ticket.begin:
                break
            work += min(ticket.end, sofar) - ticket.begin
        return work // lane.speed

    def _run(self, now: int) -> None:
        for lane in self._lanes:
            queue = lane.queue
            while queue and queue[0].due <= now:
                ticket = queue.popleft()
                lane.worked += ticket.end - ticket.begin
                if ticket.cancelled:
                    self._accounts[ticket.direction].bytes += ticket.nbytes
                else:
                    self._land(ticket, ticket.due, ticket.queued)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless the books balance and each lane is one unbroken queue (I7); see ``Link``."""
        super().check_integrity()
        queued = {t.number: t for lane in self._lanes for t in lane.queue if not t.cancelled}
        assert queued == self._live, "a transfer is lost"
        for lane in self._lanes:
            tail = 0
            for ticket in lane.queue:
                assert ticket.begin >= tail, f"I7: {ticket} overlaps the one before it"
                assert ticket.end - ticket.begin == self._load(ticket) * lane.unit, (
                    f"I7: {ticket} moves at another speed"
                )
                assert ticket.due > self._now, f"{ticket} has landed and is still queued"
                assert (ticket.due - 1) * lane.speed < ticket.end <= ticket.due * lane.speed, (
                    f"{ticket} lands at another time"
                )
                tail = ticket.end
            assert not lane.queue or tail == lane.tail, "the tail is not the end of the last"
