"""Intervals of block positions, and what can be done with them. Pure functions; nothing here knows what a block is."""

from collections.abc import Sequence
from typing import TypeAlias

Spans: TypeAlias = Sequence[tuple[int, int]]
"""Sorted, disjoint, non-touching intervals of positions."""


def clip(intervals: list[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """Return ``intervals`` cut to ``first``..``last``, sorted, with overlapping and touching ones joined."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(intervals):
        low, high = max(low, first), min(high, last)
        if low >= high:
            continue
        if joined and low <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return joined


def intersect(left: Spans, right: Spans) -> list[tuple[int, int]]:
    """Return the positions that are in both."""
    both: list[tuple[int, int]] = []
    i = j = 0
    while i < len(left) and j < len(right):
        low, high = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if low < high:
            both.append((low, high))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return both


def unite(*spans: Spans) -> list[tuple[int, int]]:
    """Return the positions that are in any of ``spans``."""
    present = [some for some in spans if some]
    if len(present) == 1:
        return list(present[0])
    joined = [span for some in present for span in some]
    return clip(joined, 0, max(high for _, high in joined)) if joined else joined


def without(low: int, high: int, spans: Spans) -> list[tuple[int, int]]:
    """Return the intervals of ``low`` to ``high`` that are not in ``spans``."""
    left: list[tuple[int, int]] = []
    for start, stop in spans:
        if stop <= low:
            continue
        if start >= high:
            break
        if start > low:
            left.append((low, start))
        low = stop
    if low < high:
        left.append((low, high))
    return left


def overlaps(low: int, high: int, spans: Spans) -> bool:
    """Return true if any position of ``low`` to ``high`` is in ``spans``."""
    return any(max(start, low) < min(stop, high) for start, stop in spans)
