"""Shared parts of prefix trees: the position where two chains part, and rows that are kept by runs of blocks.

A chained hash names its whole prefix, so chains that agree at a position agree before it. Five trees rest on that (the map
of cached copies, the indexes of keys and of chains, the router's tree, a recording's ids); what each keeps on a run
differs.
"""

from bisect import bisect_right
from collections.abc import Sequence

from kvyard.hashing.keys import Keys


def parting(left: Keys, right: Keys, same: int, other: int, left_base: int = 0, right_base: int = 0) -> int:
    """Return the first position where two chains differ. They agree at ``same`` and differ at ``other``, both in blocks.

    ``left_base`` and ``right_base`` are the positions of the first key that each of them has.
    """
    while other - same > 1:
        middle = (same + other) >> 1
        if left[middle - left_base] == right[middle - right_base]:
            same = middle
        else:
            other = middle
    return other


def agree_until(left: Keys, right: Keys, start: int, stop: int) -> int:
    """Return the first position from ``start`` on where two chains differ, or ``stop``; they agree at ``start``.

    Only the last run on a chain's path has to be compared: everything before a known hash is equal.
    """
    if left is right or left[stop - 1] == right[stop - 1]:
        return stop
    return parting(left, right, start, stop - 1)


def common_length(left: Sequence[object], right: Sequence[object]) -> int:
    """Return how many items two lists, arrays or texts begin with alike. They aren't chained, so each item is compared."""
    same, most = 0, min(len(left), len(right))
    if left[:most] == right[:most]:
        return most
    while most - same > 1:
        middle = (same + most) >> 1
        if left[same:middle] == right[same:middle]:
            same = middle
        else:
            most = middle
    return same


def paint(
    stops: list[int], masks: list[int], start: int, low: int, high: int, add: int, drop: int
) -> list[tuple[int, int, int]]:
    """Set the bits ``add`` and unset the bits ``drop`` in the rows of blocks ``low`` to ``high``.

    Rows are kept by runs: ``stops`` says where each ends, the first begins at ``start``, and ``masks`` are their bits; no two
    neighbours are equal. Returns the runs that were there, as (low, high, bits).
    """
    first = run = bisect_right(stops, low)
    if high <= stops[run]:
        was = masks[run]
        new = _changed(was, add, drop)
        if new != was:
            repaint(stops, masks, start, run, low, high, new)
        return [(low, high, was)]
    begin = stops[run - 1] if run else start
    before: list[tuple[int, int, int]] = []
    new_stops: list[int] = []
    new_masks: list[int] = []
    if begin < low:
        new_stops.append(low)
        new_masks.append(masks[run])
    position = low
    while position < high:
        old, stop = masks[run], stops[run]
        end = stop if stop < high else high
        before.append((position, end, old))
        new = _changed(old, add, drop)
        if new_masks and new_masks[-1] == new:
            new_stops[-1] = end
        else:
            new_stops.append(end)
            new_masks.append(new)
        if end < stop:
            if new == old:
                new_stops[-1] = stop
            else:
                new_stops.append(stop)
                new_masks.append(old)
        position = end
        run += 1
    if first and masks[first - 1] == new_masks[0]:
        first -= 1
    if run < len(masks) and masks[run] == new_masks[-1]:
        new_stops[-1] = stops[run]
        run += 1
    stops[first:run] = new_stops
    masks[first:run] = new_masks
    return before


def _changed(row: int, add: int, drop: int) -> int:
    """Return a row with the bits ``add`` and without the bits ``drop``. No complement is made: rows may have
    thousands of bits.
    """
    if add:
        row |= add
    if drop:
        row ^= row & drop
    return row


def repaint(stops: list[int], masks: list[int], start: int, run: int, low: int, high: int, new: int) -> None:
    """Make ``new`` the row of blocks ``low`` to ``high``, which lie in one ``run`` that has another; see ``paint``."""
    stop = stops[run]
    at_start = low == (stops[run - 1] if run else start)
    if at_start and run and masks[run - 1] == new:
        # On where the neighbour ends: a replica that fills up.
        if high < stop:
            stops[run - 1] = high
            return
        del stops[run - 1], masks[run]
        if run < len(masks) and masks[run] == new:
            del stops[run - 1], masks[run]
    elif high == stop and run + 1 < len(masks) and masks[run + 1] == new:
        # Up to where the neighbour begins: an eviction from the tail.
        if at_start:
            del stops[run], masks[run]
        else:
            stops[run] = low
    elif high == stop:
        if at_start:
            masks[run] = new
        else:
            stops.insert(run, low)
            masks.insert(run + 1, new)
    elif at_start:
        stops.insert(run, high)
        masks.insert(run, new)
    else:
        stops[run:run] = (low, high)
        masks[run:run] = (masks[run], new)
