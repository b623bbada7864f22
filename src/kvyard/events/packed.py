"""Events of a large batch, packed: of 262,144 events only some are objects at a time.

Python takes memory for small objects in arenas of a MiB, and returns one when nothing is left in it. Where a server applies
a batch of many objects bit by bit, what it allocates meanwhile to stay lies between them, and each such object keeps its
arena. Pieces that are packed are large blocks of memory, which go back to the system when they are freed.
"""

import pickle  # of our own objects, which never leave this process
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar, overload

from kvyard.events.types import Cleared, Event

T = TypeVar("T")

PIECE = 1024
"""Values that are packed together."""


class Packed(Sequence[T], Generic[T]):
    """A sequence that grows at its end and makes its values anew whenever it is iterated over."""

    __slots__ = ("_data", "_open", "_pieces")

    def __init__(self, values: Iterable[T] = ()) -> None:
        self._data = bytearray()
        """The pieces, one behind the other: one block of memory however many there are."""
        self._pieces: list[tuple[int, int]] = []
        """Numbers of values and of bytes, by piece."""
        self._open: list[T] = []
        """The last values, fewer than a piece."""
        self.extend(values)

    def append(self, value: T) -> None:
        self._open.append(value)
        if len(self._open) >= PIECE:
            self._pack()

    def extend(self, values: Iterable[T]) -> None:
        """Append ``values``; those that are packed already aren't unpacked."""
        if isinstance(values, Packed):
            self._pack()
            self._data += values._data
            self._pieces += values._pieces
            self._open = list(values._open)
            return
        for value in values:
            self.append(value)

    def pieces(self) -> Iterator[list[T]]:
        """Yield the values in lists of at most ``PIECE``."""
        low = 0
        for _, size in self._pieces:
            yield pickle.loads(self._data[low : low + size])
            low += size
        if self._open:
            yield self._open

    def __len__(self) -> int:
        return sum(count for count, _ in self._pieces) + len(self._open)

    def __iter__(self) -> Iterator[T]:
        for piece in self.pieces():
            yield from piece

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if position < 0:
            raise IndexError("there is no such value")
        for piece in self.pieces():
            if position < len(piece):
                return piece[position]
            position -= len(piece)
        raise IndexError("there is no such value")

    def _pack(self) -> None:
        if self._open:
            packed = pickle.dumps(self._open, pickle.HIGHEST_PROTOCOL)
            self._data += packed
            self._pieces.append((len(self._open), len(packed)))
            self._open = []


class PackedEvents(Packed[Event]):
    """Packed events."""

    __slots__ = ("restates",)

    def __init__(self) -> None:
        self.restates = False
        """True if one of the events clears all tiers."""
        super().__init__()

    def append(self, value: Event) -> None:
        self.restates |= isinstance(value, Cleared) and value.tier is None
        super().append(value)

    def extend(self, values: Iterable[Event]) -> None:
        if isinstance(values, PackedEvents):
            self.restates |= values.restates
        super().extend(values)


def pieces_of(events: Sequence[Event]) -> Iterator[Sequence[Event]]:
    """Yield ``events`` in sequences of at most ``PIECE``."""
    if isinstance(events, Packed):
        yield from events.pieces()
        return
    for low in range(0, len(events), PIECE):
        yield events[low : low + PIECE]
