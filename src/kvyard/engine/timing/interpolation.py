"""Linear interpolation in measured rows, apart from the tables that hold them so that it can be compiled."""

from bisect import bisect_right
from collections.abc import Sequence


def along(axis: Sequence[int], us: Sequence[float], x: float) -> float:
    """Return the value at ``x``, linear between two points; below the first point the first value, beyond the last as between
    the last two.
    """
    last = len(axis) - 2
    low = bisect_right(axis, x) - 1
    if low < 0 or last < 0:
        return us[0]
    if low > last:
        low = last
    start = us[low]
    share = (x - axis[low]) / (axis[low + 1] - axis[low])
    return start + share * (us[low + 1] - start)


def row_between(rows: Sequence[int], us: Sequence[Sequence[float]], x: float) -> tuple[float, ...]:
    """Return the row at ``x`` of the axis ``rows``, which is flat before its first point."""
    if len(rows) == 1:
        return tuple(us[0])
    low, share = _place(rows, x)
    near, far = us[low], us[low + 1]
    return tuple([near[column] + share * (far[column] - near[column]) for column in range(len(near))])


def across(rows: Sequence[int], axis: Sequence[int], us: Sequence[Sequence[float]], x: float, y: float) -> float:
    """Return ``along(at, row_between(rows, us, x), y)``, without the rest of the row."""
    near = far = us[0]
    share = 0.0
    if len(rows) > 1:
        low, share = _place(rows, x)
        near, far = us[low], us[low + 1]
    last = len(axis) - 2
    column = bisect_right(axis, y) - 1
    if column < 0 or last < 0:
        return near[0] + share * (far[0] - near[0])
    if column > last:
        column = last
    here = near[column] + share * (far[column] - near[column])
    there = near[column + 1] + share * (far[column + 1] - near[column + 1])
    return here + (y - axis[column]) / (axis[column + 1] - axis[column]) * (there - here)


def _place(rows: Sequence[int], x: float) -> tuple[int, float]:
    """Return the row before ``x``, and the share of the way from there to the next."""
    low = min(max(bisect_right(rows, x) - 1, 0), len(rows) - 2)
    share = (x - rows[low]) / (rows[low + 1] - rows[low])
    return low, share if share > 0.0 else 0.0
