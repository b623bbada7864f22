"""The gaps between tokens of a whole run, in little room.

A pass with n decoding requests is n equal gaps, and there are millions of passes. So gaps are kept as durations with counts,
to the nearest microsecond, and equal ones are put together now and then.
"""

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvyard.clock import US

Column: TypeAlias = npt.NDArray[np.int64]

_ROOM: Final = 1 << 16
"""Passes kept as they come before they are put together."""


class Gaps:
    """Durations with counts."""

    __slots__ = ("_buffer", "_counts", "_durations", "_held", "_singles", "_weights")

    def __init__(self) -> None:
        self._durations: Column = np.zeros(0, dtype=np.int64)
        self._counts: Column = np.zeros(0, dtype=np.int64)
        self._buffer: list[Column] = []
        self._weights: list[int] = []
        self._held = 0
        self._singles: list[tuple[int, int]] = []

    def add(self, durations: Column, count: int) -> None:
        """Each of ``durations`` (nanoseconds) was the gap of ``count`` requests."""
        self._buffer.append(durations)
        self._weights.append(count)
        self._held += len(durations)
        if self._held >= _ROOM:
            self._settle()

    def add_one(self, duration: int, count: int) -> None:
        """``duration`` was the gap of ``count`` requests."""
        self._singles.append((duration, count))
        if len(self._singles) >= _ROOM:
            self._settle()

    def columns(self) -> tuple[Column, Column]:
        """The durations, ascending, in nanoseconds, and how often each occurred."""
        self._settle()
        return self._durations * US, self._counts

    def _settle(self) -> None:
        if not self._buffer and not self._singles:
            return
        singles = np.array(self._singles, dtype=np.int64).reshape(-1, 2)
        fresh = np.concatenate((*self._buffer, singles[:, 0]))
        if not len(fresh):
            return  # of passes that no request had
        lengths = np.array([len(part) for part in self._buffer], dtype=np.int64)
        weights = np.repeat(np.array(self._weights, dtype=np.int64), lengths)
        self._durations, self._counts = _merged(
            np.concatenate((self._durations, (fresh + US // 2) // US)),
            np.concatenate((self._counts, weights, singles[:, 1])),
        )
        self._buffer, self._weights, self._held, self._singles = [], [], 0, []


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


def together(parts: Sequence[Gaps]) -> tuple[Column, Column]:
    """The gaps of several engines as one: durations, not in order, and how often each occurred."""
    durations, counts = zip(Gaps().columns(), *(part.columns() for part in parts))  # none at all is fine too
    return np.concatenate(durations), np.concatenate(counts)
