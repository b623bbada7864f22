"""A run: consecutive blocks of one hash chain, the unit that everything above works on.

A run is a view: it names a chain and two positions, so slicing and splitting cost the same for one block and for ten
thousand, and nothing is ever expanded into tokens. It knows nothing of physical blocks, groups or tiers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import SupportsIndex, overload

from kvyard.hashing.algorithms import Key
from kvyard.hashing.chain import Chain


class Run:
    """Blocks ``start`` to ``stop`` (exclusive, in blocks) of ``chain``. Immutable by convention."""

    __slots__ = ("chain", "start", "stop")

    def __init__(self, chain: Chain, start: int = 0, stop: int | None = None) -> None:
        self.chain = chain
        self.start = start
        self.stop = len(chain.keys) if stop is None else stop

    def __len__(self) -> int:
        return self.stop - self.start

    @overload
    def __getitem__(self, index: SupportsIndex) -> Key: ...
    @overload
    def __getitem__(self, index: slice) -> Run: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Key | Run:
        """The hash at a position of the run, or a shorter run over the same chain (step 1 only)."""
        if isinstance(index, slice):
            low, high, step = index.indices(len(self))
            if step != 1:
                raise ValueError("a run is consecutive: slice it with step 1")
            return Run(self.chain, self.start + low, self.start + max(low, high))
        at = index.__index__()
        if at < 0:
            at += len(self)
        if not 0 <= at < len(self):
            raise IndexError(f"block {at} of a run of {len(self)} blocks")
        return self.chain.keys[self.start + at]

    def __iter__(self) -> Iterator[Key]:
        return iter(self.hashes)

    def split(self, at: int) -> tuple[Run, Run]:
        """The first ``at`` blocks and the rest, both views of the same chain."""
        if not 0 <= at <= len(self):
            raise ValueError(f"cannot split a run of {len(self)} blocks at {at}")
        middle = self.start + at
        return Run(self.chain, self.start, middle), Run(self.chain, middle, self.stop)

    @property
    def hashes(self) -> list[Key]:
        """The chained hash of every block, in order."""
        return self.chain.hashes(self.start, self.stop)

    @property
    def parent(self) -> Key | None:
        """The hash of the block before the run, ``None`` at the start of the chain."""
        return self.chain.keys[self.start - 1] if self.start else None

    @property
    def tokens(self) -> list[int] | None:
        """The token ids the run covers, ``None`` where the chain was made from trace ids."""
        return self.chain.tokens_of(self.start, self.stop)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Run):
            return NotImplemented
        if (self.start, self.stop) != (other.start, other.stop):
            return False
        # A chained hash covers everything before it, so the last one speaks for all.
        return self.stop == self.start or self.chain.keys[self.stop - 1] == other.chain.keys[other.stop - 1]

    def __hash__(self) -> int:
        return hash((self.start, self.stop, self.chain.keys[self.stop - 1] if self.stop > self.start else None))

    def __repr__(self) -> str:
        return f"Run({self.start}..{self.stop} of {type(self.chain).__name__})"
