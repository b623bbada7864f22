"""The gaps between tokens of a whole run, in little room.

A pass with n decoding requests is n equal gaps, and there are millions of passes. So gaps are kept as durations with counts,
to the nearest microsecond, and equal ones are put together now and then.
"""

from array import array
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvyard.clock import US

Column: TypeAlias = npt.NDArray[np.int64]

_NONE: Final = np.zeros(0, dtype=np.int64)

_ROOM: Final = 1 << 16
"""Durations, in microseconds, that a table has a place for each of."""
_FRESH: Final = 1 << 13
"""Passes kept as they come before they are put together. A fleet may have thousands of these."""


class Gaps:
    """Durations with counts."""

    __slots__ = ("_counts", "_durations", "_fresh", "_lengths", "_weights")

    def __init__(self) -> None:
        self._durations: Column = _NONE
        self._counts: Column = _NONE
        """As narrow as they can be."""
        self._fresh = array("q")
        """Copies: what durations are a part of may be long, and would be kept with them."""
        self._weights = array("q")
        self._lengths = array("q")
        """How many of the fresh ones have each of the weights."""

    def add(self, durations: Column, count: int) -> None:
        """Each of ``durations`` (nanoseconds) was the gap of ``count`` requests."""
        self._fresh.frombytes(durations.tobytes())
        self._weights.append(count)
        self._lengths.append(len(durations))
        if len(self._fresh) + len(self._weights) >= _FRESH:
            self._settle()

    def add_one(self, duration: int, count: int) -> None:
        """``duration`` was the gap of ``count`` requests."""
        self._fresh.append(duration)
        self._weights.append(count)
        self._lengths.append(1)
        if len(self._fresh) + len(self._weights) >= _FRESH:
            self._settle()

    def columns(self) -> tuple[Column, Column]:
        """The durations, ascending, in nanoseconds, and how often each occurred."""
        self._settle()
        return self._durations.astype(np.int64) * US, self._counts.astype(np.int64)

    def _settle(self) -> None:
        if self._fresh:
            fresh = np.array(self._fresh, dtype=np.int64)
            weights = np.repeat(np.array(self._weights, dtype=np.int64), np.array(self._lengths, dtype=np.int64))
            durations, counts = _merged(
                np.concatenate((self._durations, (fresh + US // 2) // US)), np.concatenate((self._counts, weights))
            )
            self._durations, self._counts = _narrow(durations), _narrow(counts)
        self._fresh, self._weights, self._lengths = array("q"), array("q"), array("q")


def _narrow(values: Column) -> Column:
    """In four bytes each, where they fit."""
    return values.astype(np.uint32) if int(values.max()) < 1 << 32 else values


def _merged(values: Column, weights: Column) -> tuple[Column, Column]:
    """``values`` without repetition, ascending, and the summed weights of each."""
    # Sums in floats are exact: they stay far below 2**53.
    low = int(values.min())
    if int(values.max()) - low < _ROOM:
        return _counted(values, weights, low)
    # Decode steps lie close together and a few passes with prompts far above: a table for those too would be mostly empty,
    # and going through its memory would be most of the work.
    near = values < low + _ROOM
    far = ~near
    found, places = np.unique(values[far], return_inverse=True)
    dense, sums = _counted(values[near], weights[near], low)
    return np.concatenate((dense, found)), np.concatenate((sums, np.bincount(places, weights[far]).astype(np.int64)))


def _counted(values: Column, weights: Column, low: int) -> tuple[Column, Column]:
    """The same for values from ``low`` on that lie close together."""
    places = values - low
    table = np.bincount(places, weights)
    there = np.zeros(len(table), dtype=np.bool_)
    there[places] = True  # a weight may be 0
    found = np.flatnonzero(there)
    return found + low, table[found].astype(np.int64)


_MOST: Final = 1 << 22
"""Durations of several engines up to which they are only put side by side."""


def together(parts: Sequence[Gaps]) -> tuple[Column, Column]:
    """The gaps of several engines as one: durations, not in order, and how often each occurred."""
    durations, counts = [_NONE], [_NONE]
    held = 0
    for part in parts:
        more, often = part.columns()
        durations.append(more)
        counts.append(often)
        held += len(more)
        if held >= _MOST:  # equal ones are put together, so that a large fleet's take no more room than a small one's
            values, sums = _merged(np.concatenate(durations) // US, np.concatenate(counts))
            durations, counts, held = [values * US], [sums], 0
    return np.concatenate(durations), np.concatenate(counts)
