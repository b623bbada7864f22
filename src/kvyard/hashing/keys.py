"""Keys at rest: the hashes of a long chain, packed.

A cached prompt keeps its hashes for as long as it is cached, by the hundred thousand. One object per hash costs 32 to 65
bytes and a cache miss each when they are freed; packed they cost 8 or 32 bytes and are freed at once.
"""

from array import array
from typing import Protocol, TypeAlias

from kvyard.hashing.algorithms import Key
from kvyard.hashing.digest_keys import DigestKeys


class Keys(Protocol):
    """Interface of a chain's ``keys``: a length, and the hash at an absolute block position."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Key: ...


class NumberKeys(array):  # type: ignore[type-arg]
    """A growing sequence of 64-bit hashes, eight bytes each."""

    __slots__ = ()

    def between(self, start: int, stop: int) -> list[Key]:
        """Return the hashes at positions ``start`` to ``stop``."""
        return self[start:stop].tolist()

    packed = between
    """A list is the cheapest form to pass on here."""

    def cut(self, start: int, stop: int) -> "NumberKeys":
        """Return a copy of the hashes ``start`` to ``stop``."""
        return NumberKeys("Q", self[start:stop])


PackedKeys: TypeAlias = DigestKeys | NumberKeys


def packed_keys(example: Key) -> PackedKeys:
    """Return an empty sequence for keys like ``example``."""
    return NumberKeys("Q") if isinstance(example, int) else DigestKeys(len(example))


def short_text(key: Key) -> str:
    """Return a hash for people: its first 16 hexadecimal digits."""
    return key.hex()[:16] if isinstance(key, bytes) else f"{key:016x}"
