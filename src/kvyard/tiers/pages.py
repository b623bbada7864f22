"""Ranges of pages, the unit that copies move, and those of them that are on their way.

A page is ``blocks_per_chunk`` consecutive blocks of one group: what a lower tier stores, names and evicts together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvyard.blocks.spans import Spans, clip
from kvyard.hashing import Chain, Key, Keys


class PageRange(NamedTuple):
    """Pages ``start`` to ``stop`` of one group of one chain."""

    group: int
    chain: Chain
    start: int
    stop: int


def total_pages(pieces: Iterable[PageRange]) -> int:
    """How many pages ``pieces`` have together."""
    total = 0
    for piece in pieces:
        total += piece[3] - piece[2]
    return total


class PendingPages:
    """The ranges of one group that are on their way somewhere, and must not be sent there again.

    There are few at a time and they never overlap, so they are kept by where they start and compared by hash: equal at a
    position means equal before it.
    """

    __slots__ = ("_starts",)

    def __init__(self) -> None:
        self._starts: dict[int, dict[Key, PageRange]] = {}

    def add(self, piece: PageRange) -> None:
        """``piece`` sets out. No part of it may be on its way already."""
        here = self._starts.setdefault(piece.start, {})
        key = piece.chain.keys[piece.start]
        assert key not in here, f"{piece} is sent twice"
        here[key] = piece

    def remove(self, piece: PageRange) -> None:
        """``piece`` has arrived, or won't."""
        here = self._starts[piece.start]
        del here[piece.chain.keys[piece.start]]
        if not here:
            del self._starts[piece.start]

    def spans(self, keys: Keys, limit: int) -> Spans:
        """The intervals of a chain's first ``limit`` positions that are on their way."""
        found: list[tuple[int, int]] = []
        for start, here in self._starts.items():
            if start < limit:
                piece = here.get(keys[start])
                if piece is not None:
                    found.append((start, _agree(piece.chain.keys, keys, start, min(piece.stop, limit))))
        return clip(found, 0, limit) if len(found) > 1 else found

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __iter__(self) -> Iterator[PageRange]:
        for here in self._starts.values():
            yield from here.values()


def _agree(left: Keys, right: Keys, start: int, stop: int) -> int:
    """Up to where two chains that agree at ``start`` do so, at most ``stop``."""
    rest = range(start + 1, stop)
    return start + 1 + bisect_left(rest, True, key=lambda at: left[at] != right[at])
