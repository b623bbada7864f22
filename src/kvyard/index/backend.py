"""Contract of an index backend: it maps blocks to the places that hold them, and nothing else.

A backend knows request keys (chained, 64 bits, unsigned) and numbers of places (``kvyard.index.places``). It knows nothing
of engines, streams, tokens or scores, and it keeps sets: that a block was announced twice is the dedup filter's knowledge.

Three rules make backends interchangeable, and ``tests/index/test_backend.py`` holds each against a naive model:

- A chained key names its whole prefix, so a backend may compare two runs by their last keys alone.
- ``store`` and ``remove`` are idempotent. What they return is exact: the dedup filter counts by it.
- ``lookup`` never invents: a place is in a row only while it holds that key. It may have evicted a key (a byte budget).
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

import msgspec

Rows: TypeAlias = list[tuple[int, int]]
"""A prompt's rows, run-length encoded: (where the run ends, in blocks from the prompt's start; the places that hold all of
it). Runs follow each other without a gap; 0 stands for no place. Past the last run no place holds anything that counts."""


class Usage(msgspec.Struct, kw_only=True):
    """Size and counters of a backend, in blocks unless the name has another unit."""

    blocks: int = 0
    """Different keys that are held."""
    rows: int = 0
    """Runs with equal rows: what those take to write down."""
    bytes: int = 0
    """An estimate, on the high side; what the budget is held against."""
    evicted: int = 0
    """Blocks evicted to stay within the budget, since the start."""


class RowSource(Protocol):
    """Input of a scorer: rows of prompts."""

    def lookup(self, keys: Sequence[int], through_holes: bool = False) -> Rows:
        """Return the rows of a prompt. Ends at the first key that no place holds; with ``through_holes`` at the last one held.

        Changes nothing but recency.
        """

    def usage(self) -> Usage:
        """Return size and counters."""

    def check_integrity(self) -> None:
        """Raise ``AssertionError``, saying what is wrong, unless the backend agrees with itself. For tests and audits."""


class IndexBackend(RowSource, Protocol):
    """Rows by request key. Not for several threads at once, unless an implementation says otherwise."""

    def store(self, place: int, keys: Sequence[int], parent: int | None = None) -> Sequence[int]:
        """``place`` now holds ``keys``, consecutive blocks of one chain. Returns those that it held before, in order.

        A key that is listed twice was held before at its second mention. ``parent`` is the key before the first, ``None`` at
        the start of a chain or where unknown: it helps to keep runs long and changes no answer.
        """

    def remove(self, place: int, keys: Sequence[int]) -> int:
        """``place`` no longer holds ``keys``, in any order and of any chain. Returns how many it held."""

    def clear(self, place: int) -> int:
        """Clear ``place``. Returns how many keys it held. Costs by what it held, not by the index's size."""

    def holds(self, place: int, key: int) -> bool:
        """Return true if ``place`` holds ``key``. Affects neither recency nor counters: for callers that must know before a
        change."""

    def held(self, place: int) -> Iterator[Sequence[int]]:
        """Return everything that ``place`` holds, in runs of consecutive blocks. For dumps and audits; costs by
        what it yields.
        """
