"""Digests at rest: the hashes of a long chain as one string of bytes."""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from struct import Struct
from typing import Final, overload

from kvyard.hashing.algorithms import Key
from kvyard.hashing.digest_sequence import DigestSequence

_TAIL: Final = 32
"""Keys that are packed at once."""


@lru_cache
def _record(size: int) -> Struct:
    return Struct(f"{size}s")


class DigestKeys(DigestSequence):
    """A growing sequence of digests of equal length, end to end in one string of bytes.

    Equal to any sequence of the same digests, a list included.
    """

    __slots__ = ("_blob", "_packed", "_record", "_size", "_tail")

    def __init__(self, size: int) -> None:
        self._blob = b""
        self._packed = 0
        # The latest ones, not yet packed: a growing request adds them one at a time.
        self._tail: list[bytes] = []
        self._record = _record(size)
        self._size = size

    def extend(self, digests: Iterable[bytes]) -> None:
        """Add ``digests`` at the end."""
        if isinstance(digests, DigestKeys) and not digests._tail:
            self._pack()
            self._blob += digests._blob
            self._packed += digests._packed
            return
        tail = self._tail
        tail += digests
        if len(tail) >= _TAIL:
            self._pack()

    def between(self, start: int, stop: int) -> list[Key]:
        """Return the digests at positions ``start`` to ``stop``."""
        size, packed = self._size, self._packed
        keys: list[Key] = list(chain.from_iterable(self._record.iter_unpack(self._blob[start * size : stop * size])))
        if stop > packed:
            keys += self._tail[max(0, start - packed) : stop - packed]
        return keys

    def cut(self, start: int, stop: int) -> "DigestKeys":
        """Return a copy of the digests ``start`` to ``stop``."""
        size, packed = self._size, self._packed
        part = DigestKeys(size)
        part._blob = self._blob[start * size : stop * size]
        if stop > packed:
            part._blob += b"".join(self._tail[max(0, start - packed) : stop - packed])
        part._packed = len(part._blob) // size
        return part

    def packed(self, start: int, stop: int) -> "DigestKeys":
        """Return the digests in packed form: cheaper than a list if they aren't read one by one."""
        return self.cut(start, stop)

    def narrowed(self) -> list[int]:
        """Return the last 64 bits of each digest, as events carry them by default."""
        self._pack()
        words = Struct(f">{self._size - 8}xQ")
        return list(chain.from_iterable(words.iter_unpack(self._blob)))

    def _pack(self) -> None:
        self._blob += b"".join(self._tail)
        self._packed += len(self._tail)
        self._tail.clear()

    def __len__(self) -> int:
        return self._packed + len(self._tail)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        if not isinstance(index, int):
            return list(self)[index]
        if index < 0:
            index += len(self)
        if 0 <= index < self._packed:
            offset = index * self._size
            return self._blob[offset : offset + self._size]
        if index < 0:
            raise IndexError(f"no digest {index} among {len(self)}")
        return self._tail[index - self._packed]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.between(0, len(self)))  # type: ignore[arg-type]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DigestKeys | list | tuple):
            return len(self) == len(other) and list(self) == list(other)
        return NotImplemented

    def __hash__(self) -> int:
        raise TypeError("unhashable type: 'DigestKeys'")

    def __repr__(self) -> str:
        return f"DigestKeys({[digest.hex() for digest in self]})"
