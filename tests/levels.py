"""Answers of an index or a tree by lengths, as lists by slot: easier to compare."""

from __future__ import annotations

from collections.abc import Sequence


def by_slot(levels: Sequence[tuple[int, int]], count: int) -> list[int]:
    """The blocks that each of ``count`` slots has."""
    out = [0] * count
    for blocks, slots in levels:
        for slot in range(count):
            if slots >> slot & 1:
                out[slot] = blocks
    return out
