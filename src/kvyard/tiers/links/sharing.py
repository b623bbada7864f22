"""Max-min fair shares: how transfers that move at the same time divide the bandwidth. Pure arithmetic, no time.

The limits are nested: a client's cap within a direction, the direction's bandwidth, and the bandwidth of both directions
together. Raise the rate of all transfers alike until a limit is full; those under it stay there, the others rise on. None
can then be given more without taking it from another that has no more. All transfers of one client in one
direction are alike, so the unit is that group.

Everything frozen under a full limit adds up to that limit, which is a whole number. So each rate is a whole number divided by a
number of transfers, and exact arithmetic stays cheap.
"""

from collections.abc import Collection, Hashable, Mapping
from fractions import Fraction
from typing import Any, Generic, TypeVar

from mypy_extensions import mypyc_attr

T = TypeVar("T")


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class ClientGroup(Generic[T]):
    """The moving transfers of one client (or of all, where clients have no cap) in one direction, and the rate of each."""

    __slots__ = ("cap", "den", "key", "members", "num")

    def __init__(self, key: str, cap: int | None) -> None:
        self.key = key
        self.cap = cap
        self.members: list[T] = []
        self.num = 0
        self.den = 1


class _OpenLane:
    """One direction while it is being filled."""

    __slots__ = ("count", "groups", "left")

    def __init__(self, left: int | None, groups: list[ClientGroup[Any]]) -> None:
        self.left = left
        self.groups = groups
        self.count = sum(len(group.members) for group in groups)


def fill(lanes: Collection[tuple[int | None, Collection[ClientGroup[Any]]]], duplex: int | None) -> None:
    """Set ``num / den`` of every group in ``lanes``, pairs of a direction's bandwidth and its groups, none of them empty.

    Every group must be under some limit. Takes time proportional to the number of groups, and of sorting them.
    """
    # Caps are alike within a direction: the group with the most members reaches its cap first. It is taken from the end.
    open_lanes = [
        _OpenLane(left, sorted(groups, key=lambda group: len(group.members))) for left, groups in lanes if groups
    ]
    count = sum(lane.count for lane in open_lanes)
    while open_lanes:
        # The limit that is full first: the one with the least left for each transfer under it. Innermost first among equals,
        # since what a client's cap decides is the same either way.
        num, den = (duplex, count) if duplex is not None else (0, 0)
        tight: _OpenLane | None = None
        capped = False
        for lane in open_lanes:
            if (left := lane.left) is not None and (not den or left * den <= num * lane.count):
                num, den, tight, capped = left, lane.count, lane, False
            group = lane.groups[-1]
            if (cap := group.cap) is not None and (not den or cap * den <= num * len(group.members)):
                num, den, tight, capped = cap, len(group.members), lane, True
        assert den, "a group without any limit"
        if tight is None:
            for lane in open_lanes:
                _freeze(lane.groups, num, den)
            return
        if duplex is not None:
            duplex -= num
        count -= den
        if capped:
            _freeze((tight.groups.pop(),), num, den)
            tight.count -= den
            if tight.left is not None:
                tight.left -= num
            if tight.groups:
                continue
        else:
            _freeze(tight.groups, num, den)
        open_lanes.remove(tight)


def _freeze(groups: Collection[ClientGroup[Any]], num: int, den: int) -> None:
    for group in groups:
        group.num = num
        group.den = den


def check_fair(flows: Collection[tuple[Fraction, Mapping[Hashable, int | None]]]) -> None:
    """Raise ``AssertionError`` unless the rates of ``flows``, each with the limits it is under by name, are max-min fair (I7).

    They are if no limit is exceeded, and each flow has one that is full and under which none has more.
    """
    under: dict[Hashable, list[Fraction]] = {}
    for rate, limits in flows:
        for name in limits:
            under.setdefault(name, []).append(rate)
    for rate, limits in flows:
        bound = False
        for name, limit in limits.items():
            if limit is not None:
                used = sum(under[name])
                assert used <= limit, f"I7: {used} B/s under {name}, which has {limit}"
                bound = bound or (used == limit and rate == max(under[name]))
        assert bound, f"I7: a transfer at {rate} B/s could move faster"
