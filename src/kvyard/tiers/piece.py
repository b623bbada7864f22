"""A piece: what one copy moves of one group of one chain."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvyard.hashing import Chain


class Piece(NamedTuple):
    """Pages ``start`` to ``stop`` of one group of one chain."""

    group: int
    chain: Chain
    start: int
    stop: int


def total_pages(pieces: Iterable[Piece]) -> int:
    """How many pages ``pieces`` have together."""
    total = 0
    for piece in pieces:
        total += piece[3] - piece[2]
    return total
