"""A link whose transfers share bandwidth max-min fairly, without letting any lie idle.

The shares hold from one whole nanosecond to the next: where a transfer starts, lands or is cancelled, they change.
Bytes are counted in fractions with a whole denominator, each transfer its own, so nothing is ever rounded: a transfer lands at
the first nanosecond at which all its bytes have moved, however often one looks in between.
"""

from collections.abc import Hashable
from fractions import Fraction
from heapq import heapify, heappop, heappush
from math import gcd

from mypy_extensions import mypyc_attr

from kvyard.clock import SECOND
from kvyard.integers import ceil_div
from kvyard.tiers.links.config import LinkConfig
from kvyard.tiers.links.link import Direction, LinkBase, Transfer
from kvyard.tiers.links.sharing import ClientGroup, check_fair, fill

REMEMBERED = 4096
"""Combinations of group sizes whose shares are kept."""


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class FairTransfer(Transfer):
    """A transfer, and how far it has come."""

    left: int
    """Amount that still has to move, in billionths of a byte divided by ``scale``."""
    scale: int
    """All denominators of the rates it has had divide this."""
    step: int
    """Amount that moves in one nanosecond, in the unit of ``left``."""


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class FairLink(LinkBase[FairTransfer]):
    """See ``Link`` for the verbs. A submission, a start and a landing each take time proportional to the moving transfers."""

    def __init__(self, config: LinkConfig) -> None:
        super().__init__(config, FairTransfer)
        self._at = 0  # how far the bytes have been moved; never later than now
        self._waiting: list[tuple[int, int, FairTransfer]] = []  # for their first byte; a heap by (started, number)
        self._moving: list[FairTransfer] = []
        self._groups: tuple[dict[str, ClientGroup[FairTransfer]], dict[str, ClientGroup[FairTransfer]]] = ({}, {})
        self._next: int | None = None  # when the first of the moving lands if the shares stay as they are
        self._busy = [0, 0]
        self._client_caps = tuple(lane.client_bandwidth for lane in config.lanes)
        self._rates: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        self._earliest: int | None = None
        self._earliest_known = True

    def _constants(self) -> list[object]:
        return [self.config, self._rates]

    def _queue(self, flow: FairTransfer, first_byte: int) -> None:
        flow.left = self._load(flow) * SECOND
        flow.scale = 1
        flow.step = 0
        heappush(self._waiting, (first_byte, flow.number, flow))
        self._earliest_known = False

    def _drop(self, flow: FairTransfer) -> None:
        """Take the unmoved rest of ``flow`` off the link; its share goes to the others."""
        if flow.step:
            self._settle(self._now)
            load = self._load(flow)
            moved = load - ceil_div(flow.left, SECOND * flow.scale)
            self._accounts[flow.direction].bytes += flow.nbytes * moved // load
            self._leave(flow)
            self._share()
        else:
            self._waiting = [entry for entry in self._waiting if entry[2] is not flow]
            heapify(self._waiting)
        self._earliest_known = False

    def earliest(self) -> int | None:
        """Return when the next transfer lands; see ``Link``. Asked again without a change in between, it takes no time."""
        if self._landed:
            return self._now
        if not self._earliest_known:
            self._earliest = self._foresee()
            self._earliest_known = True
        return self._earliest

    def _busy_ns(self, direction: Direction) -> int:
        return self._busy[direction] + (self._now - self._at if self._groups[direction] else 0)

    # The course of events.

    def _run(self, now: int) -> None:
        waiting = self._waiting
        while True:
            t = self._next
            if waiting and (t is None or waiting[0][0] < t):
                t = waiting[0][0]
            if t is None or t > now:
                return
            self._turn(t)

    def _turn(self, t: int) -> None:
        """Carry out everything that happens at ``t``, the next instant at which something does."""
        self._settle(t)
        if self._next == t:
            for flow in [flow for flow in self._moving if flow.left <= 0]:
                self._leave(flow)
                assert flow.started is not None
                self._land(flow, t, t - flow.started - self._alone_ns(flow))
            self._earliest_known = False
        waiting = self._waiting
        while waiting and waiting[0][0] <= t:
            flow = heappop(waiting)[2]
            if flow.left and self._alone[flow.direction] is not None:
                self._join(flow)
            else:
                self._land(flow, t, 0)
                self._earliest_known = False
        self._share()

    def _settle(self, t: int) -> None:
        """Move the bytes up to ``t``, before which nothing starts or lands."""
        if passed := t - self._at:
            for flow in self._moving:
                flow.left -= flow.step * passed
            out, into = self._groups
            if out:
                self._busy[0] += passed
            if into:
                self._busy[1] += passed
            self._at = t

    def _join(self, flow: FairTransfer) -> None:
        cap = self._client_caps[flow.direction]
        key = "" if cap is None else flow.client  # without caps all clients are alike
        groups = self._groups[flow.direction]
        group = groups.get(key)
        if group is None:
            group = groups[key] = ClientGroup(key, cap)
        group.members.append(flow)
        self._moving.append(flow)

    def _leave(self, flow: FairTransfer) -> None:
        groups = self._groups[flow.direction]
        group = groups["" if self._client_caps[flow.direction] is None else flow.client]
        group.members.remove(flow)
        if not group.members:
            del groups[group.key]
        self._moving.remove(flow)

    def _share(self) -> None:
        """Compute the rates of moving transfers, and the first landing."""
        moving = self._moving
        if not moving:
            self._next = None
            return
        if len(moving) == 1:
            flow = moving[0]
            alone = self._alone[flow.direction]
            assert alone is not None
            flow.step = alone * flow.scale
            self._next = self._at - (-flow.left // flow.step)
            return
        self._fill()
        soonest: int | None = None
        for groups in self._groups:
            for group in groups.values():
                num, den = group.num, group.den
                for flow in group.members:
                    if flow.scale % den:
                        finer = den // gcd(flow.scale, den)
                        flow.left *= finer
                        flow.scale *= finer
                    flow.step = step = num * (flow.scale // den)
                    lasts = ceil_div(flow.left, step)
                    if soonest is None or lasts < soonest:
                        soonest = lasts
        assert soonest is not None
        self._next = self._at + soonest

    def _fill(self) -> None:
        """Give each group its rate. It depends on their sizes only, and there the same few come again and again."""
        out, into = self._groups
        groups = [*out.values(), *into.values()]
        sizes = (len(out), *[len(group.members) for group in groups])
        rates = self._rates.get(sizes)
        if rates is None:
            lanes = self.config.lanes
            fill(
                ((lanes[0].bandwidth, out.values()), (lanes[1].bandwidth, into.values())), self.config.duplex_bandwidth
            )
            if len(self._rates) >= REMEMBERED:
                self._rates.clear()
            self._rates[sizes] = [(group.num, group.den) for group in groups]
            return
        for group, (num, den) in zip(groups, rates, strict=False):
            group.num = num
            group.den = den

    def _foresee(self) -> int | None:
        """Return when the next transfer lands, were nothing else to be submitted: those that wait will slow those that move."""
        waiting = self._waiting
        if not waiting:
            return self._next
        start, _, first = waiting[0]
        if self._next is not None and self._next <= start:
            return self._next
        if not self._moving:
            lands = start + self._alone_ns(first)
            if all(lands <= entry[0] for entry in waiting[1:3]):  # a heap: the second to start is one of these
                return lands
        return self._try_starts()

    def _try_starts(self) -> int | None:
        """Like ``earliest``: let waiting transfers start, up to the first landing, and undo all of it."""
        since, landing, busy, present = self._at, self._next, self._busy.copy(), len(self._moving)
        before = [(flow, flow.left, flow.scale, flow.step) for flow in self._moving]
        coming = sorted(self._waiting)
        for n, (start, _, flow) in enumerate(coming, 1):
            if self._next is not None and self._next <= start:
                break
            if not flow.left or self._alone[flow.direction] is None:
                self._next = start
                break
            before.append((flow, flow.left, flow.scale, flow.step))
            self._settle(start)
            self._join(flow)
            if n == len(coming) or coming[n][0] > start:  # else the next joins at the same instant
                self._share()
        for flow in self._moving[present:]:
            self._leave(flow)
        for flow, left, scale, step in before:
            flow.left, flow.scale, flow.step = left, scale, step
        self._at, self._busy = since, busy
        self._next, landing = landing, self._next
        return landing

    # The check.

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless the books balance and the shares are max-min fair (I7); see ``Link``."""
        super().check_integrity()
        assert self._at <= self._now
        waiting = {number: flow for _, number, flow in self._waiting}
        moving = {flow.number: flow for flow in self._moving}
        assert not waiting.keys() & moving.keys(), "a transfer waits and moves"
        assert waiting | moving == self._live, "a transfer is lost"
        assert all(start == flow.started for start, _, flow in self._waiting)
        assert all(flow.left > 0 for flow in self._moving), "a transfer with nothing left to move is moving"
        grouped = [flow for groups in self._groups for group in groups.values() for flow in group.members]
        assert sorted(flow.number for flow in grouped) == sorted(moving), "the groups are not those who move"
        check_fair([(Fraction(flow.step, flow.scale), self._limits(flow)) for flow in self._moving])
        lands = [self._at - (-flow.left // flow.step) for flow in self._moving]
        assert self._next == min(lands, default=None), "the next landing is not the first"

    def _limits(self, flow: FairTransfer) -> dict[Hashable, int | None]:
        lane = self.config.lanes[flow.direction]
        return {
            "both directions": self.config.duplex_bandwidth,
            flow.direction.name: lane.bandwidth,
            (flow.direction.name, flow.client): lane.client_bandwidth,
        }
