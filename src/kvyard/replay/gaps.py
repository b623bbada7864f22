"""The gaps between tokens of a whole run, in little room.

A pass with n decoding requests is n equal gaps, and there are millions of passes. So gaps are counted by duration, to the
nearest microsecond.
"""

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvyard.clock import US

Column: TypeAlias = npt.NDArray[np.int64]

_ROOM: Final = 1 << 20
"""Durations, in microseconds, that the table has a place for each of: most of it is never touched, and takes no memory then."""
_FRESH: Final = 1 << 8
"""Plans and single passes kept as they come before they are counted; a plan has up to a thousand passes."""


class Gaps:
    """Durations with counts. One for a whole fleet."""

    def __init__(self) -> None:
        self._table: Column = np.zeros(_ROOM, dtype=np.int64)
        """Number of gaps by their duration in microseconds."""
        self._longer: dict[int, int] = {}
        """Number of gaps by their duration, where the table has no place for it."""
        self._plans: list[Column] = []
        """Durations that were not counted yet, of plans, and how many requests had each of them."""
        self._weights: list[int] = []
        self._singles: list[int] = []
        """Durations of single passes that were not counted yet, and how many requests had each of them."""
        self._single_weights: list[int] = []

    def add(self, durations: Column, count: int) -> None:
        """Count each of ``durations`` (nanoseconds), which must not change any more, as a gap of ``count`` requests."""
        self._plans.append(durations)
        self._weights.append(count)
        if len(self._plans) >= _FRESH:
            self._settle()

    def add_one(self, duration: int, count: int) -> None:
        """Count ``duration`` as a gap of ``count`` requests."""
        self._singles.append(duration)
        self._single_weights.append(count)
        if len(self._singles) >= _FRESH:
            self._settle()

    def clear(self) -> None:
        """Discard all gaps so far."""
        self._settle()
        self._table[:] = 0
        self._longer.clear()

    def columns(self) -> tuple[Column, Column]:
        """Return the durations, ascending, in nanoseconds, and how often each occurred."""
        self._settle()
        near = np.flatnonzero(self._table)
        far = np.array(sorted(self._longer), dtype=np.int64)
        often = np.array([self._longer[gap] for gap in far.tolist()], dtype=np.int64)
        return np.concatenate((near, far)) * US, np.concatenate((self._table[near], often))

    def _settle(self) -> None:
        if self._plans:
            weights = np.repeat(np.array(self._weights, dtype=np.int64), [len(plan) for plan in self._plans])
            self._count(np.concatenate(self._plans), weights)
            self._plans, self._weights = [], []
        if self._singles:
            self._count(np.array(self._singles, dtype=np.int64), np.array(self._single_weights, dtype=np.int64))
            self._singles, self._single_weights = [], []

    def _count(self, places: Column, weights: Column) -> None:
        """Count durations; ``places`` are changed."""
        places += US // 2
        places //= US
        if len(places) and int(places.max()) >= _ROOM:
            places, weights = self._count_longer(places, weights)
        np.add.at(self._table, places, weights)

    def _count_longer(self, places: Column, weights: Column) -> tuple[Column, Column]:
        """Count what the table has no place for; returns the others."""
        near = places < _ROOM
        for place, weight in zip(places[~near].tolist(), weights[~near].tolist()):
            if weight:
                self._longer[place] = self._longer.get(place, 0) + weight
        return places[near], weights[near]
