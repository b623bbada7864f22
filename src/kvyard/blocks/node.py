"""Nodes: stretches of chains in the tree of what is cached, and marks inside their blocks.

Mere records: how they are found, split and joined is the business of ``CacheMap``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvyard.blocks.extent import Extent
from kvyard.hashing import Chain, Key, Run

if TYPE_CHECKING:
    from kvyard.blocks.cache_map import CacheMap


class Node:
    """Blocks ``start`` to ``stop`` of a chain, all in the same condition: each copy covers exactly these."""

    __slots__ = ("chain", "copies", "hole", "key", "keys", "kids", "map", "parent", "start", "stop")

    def __init__(self, owner: CacheMap, chain: Chain, key: Key, start: int, stop: int, parent: Node | None) -> None:
        self.map = owner
        self.chain = chain
        self.keys = chain.keys
        self.key = key
        """The hash of the first block."""
        self.start = start
        self.stop = stop
        self.parent = parent
        self.kids = 0
        self.hole: Node | None = None
        """The child that last became a hole: where this node ends, once its last blocks have been evicted."""
        self.copies: list[Extent] = []
        """First registered first: a lookup takes the first."""

    def __repr__(self) -> str:
        return f"Node({self.start}..{self.stop}, copies={len(self.copies)}, kids={self.kids})"


class Marks:
    """The stretches, one hash unit each, that end inside a block and by which it can be found as well."""

    __slots__ = ("map", "runs")

    def __init__(self, owner: CacheMap, runs: list[Run]) -> None:
        self.map = owner
        self.runs = runs
