"""Keys at rest: the hashes of a long chain, packed.

A cached prompt keeps its hashes for as long as it is cached, by the hundred thousand. One object per hash costs 32 to 65
bytes and a cache miss each when they are let go; packed they cost 8 or 32 bytes and are let go at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Protocol, TypeAlias

from kvyard.hashing.algorithms import Key


class Keys(Protocol):
    """What a chain's ``keys`` must offer: a length, and the hash at an absolute block position."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Key: ...


class DigestKeys:
    """A growing sequence of digests of equal length, end to end in one string of bytes."""

    __slots__ = ("_blob", "_size")

    def __init__(self, size: int) -> None:
        self._blob = b""
        self._size = size

    def extend(self, digests: Iterable[bytes]) -> None:
        """Add ``digests`` at the end."""
        self._blob += b"".join(digests)

    def between(self, start: int, stop: int) -> list[Key]:
        """The digests at positions ``start`` to ``stop``."""
        size, blob = self._size, self._blob
        return [blob[at : at + size] for at in range(start * size, stop * size, size)]

    def cut(self, start: int, stop: int) -> DigestKeys:
        """A copy of the digests ``start`` to ``stop``."""
        part = DigestKeys(self._size)
        part._blob = self._blob[start * self._size : stop * self._size]
        return part

    def __len__(self) -> int:
        return len(self._blob) // self._size

    def __getitem__(self, index: int) -> bytes:
        at = (index + len(self) if index < 0 else index) * self._size
        digest = self._blob[at : at + self._size] if at >= 0 else b""
        if not digest:
            raise IndexError(f"no digest {index} among {len(self)}")
        return digest


class NumberKeys(array):  # type: ignore[type-arg]
    """A growing sequence of 64-bit hashes, eight bytes each."""

    __slots__ = ()

    def between(self, start: int, stop: int) -> list[Key]:
        """The hashes at positions ``start`` to ``stop``."""
        return self[start:stop].tolist()

    def cut(self, start: int, stop: int) -> NumberKeys:
        """A copy of the hashes ``start`` to ``stop``."""
        return NumberKeys("Q", self[start:stop])


PackedKeys: TypeAlias = DigestKeys | NumberKeys


def packed_keys(example: Key) -> PackedKeys:
    """An empty sequence for keys like ``example``."""
    return NumberKeys("Q") if isinstance(example, int) else DigestKeys(len(example))
