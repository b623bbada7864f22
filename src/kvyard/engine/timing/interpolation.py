"""Linear interpolation in measured rows, apart from the tables that hold them so that it can be compiled."""


class Line:
    """Microseconds along one axis."""

    __slots__ = ("_at", "_us")

    def __init__(self, at: tuple[int, ...], us: tuple[float, ...]) -> None:
        self._at = _floats(at)
        self._us = _floats(us)

    def value(self, x: float) -> float:
        return along(self._at, self._us, x)


class Grid:
    """Microseconds over two axes: one row of ``us`` per point of ``rows``, along ``at``."""

    __slots__ = ("_at", "_rows", "_us")

    def __init__(self, rows: tuple[int, ...], at: tuple[int, ...], us: tuple[tuple[float, ...], ...]) -> None:
        self._rows = _floats(rows)
        self._at = _floats(at)
        self._us = tuple([_floats(row) for row in us])

    def value(self, x: float, y: float) -> float:
        return across(self._rows, self._at, self._us, x, y)


def along(axis: tuple[float, ...], us: tuple[float, ...], x: float) -> float:
    """Return the value at ``x``, linear between two points; below the first point the first value, beyond the last as between
    the last two.
    """
    last = len(axis) - 2
    low = place(axis, x)
    if low < 0 or last < 0:
        return us[0]
    if low > last:
        low = last
    start = us[low]
    share = (x - axis[low]) / (axis[low + 1] - axis[low])
    return start + share * (us[low + 1] - start)


def row_between(rows: tuple[float, ...], us: tuple[tuple[float, ...], ...], x: float) -> tuple[float, ...]:
    """Return the row at ``x`` of the axis ``rows``, which is flat before its first point."""
    if len(rows) == 1:
        return us[0]
    low = place_before(rows, x)
    share = _way(rows, low, x)
    near, far = us[low], us[low + 1]
    return tuple([near[column] + share * (far[column] - near[column]) for column in range(len(near))])


def across(
    rows: tuple[float, ...], axis: tuple[float, ...], us: tuple[tuple[float, ...], ...], x: float, y: float
) -> float:
    """Return ``along(axis, row_between(rows, us, x), y)``, without the rest of the row."""
    near = far = us[0]
    share = 0.0
    if len(rows) > 1:
        low = place_before(rows, x)
        share = _way(rows, low, x)
        near, far = us[low], us[low + 1]
    last = len(axis) - 2
    column = place(axis, y)
    if column < 0 or last < 0:
        return near[0] + share * (far[0] - near[0])
    if column > last:
        column = last
    here = near[column] + share * (far[column] - near[column])
    there = near[column + 1] + share * (far[column + 1] - near[column + 1])
    return here + (y - axis[column]) / (axis[column + 1] - axis[column]) * (there - here)


def place(axis: tuple[float, ...], x: float) -> int:
    """Return the place of the last point at or before ``x``, -1 before the first: ``bisect_right(axis, x) - 1``, compiled."""
    low, high = 0, len(axis)
    while low < high:
        middle = (low + high) // 2
        if x < axis[middle]:
            high = middle
        else:
            low = middle + 1
    return low - 1


def place_before(axis: tuple[float, ...], x: float) -> int:
    """Return the place of the point before ``x``: never the last one, unless there is no other."""
    low = place(axis, x)
    last = len(axis) - 2
    if low > last:
        low = last
    return low if low > 0 else 0


def _way(rows: tuple[float, ...], low: int, x: float) -> float:
    """Return the share of the way from the row ``low`` to the next."""
    share = (x - rows[low]) / (rows[low + 1] - rows[low])
    return share if share > 0.0 else 0.0


def _floats(values: tuple[float, ...]) -> tuple[float, ...]:
    return tuple([float(value) for value in values])
