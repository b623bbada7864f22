"""Fingerprints of the latest batches of a stream, by sequence, in 16 bytes each.

A gateway follows many streams for months. As a dictionary, the fingerprints of one stream took ten times as much, in objects
of their own among all others, and grew for most of an hour.
"""

from array import array
from bisect import bisect_left


class Fingerprints:
    """Fingerprints by rising sequence; of more than ``most`` the oldest go."""

    __slots__ = ("_marks", "_most", "_sequences")

    def __init__(self, most: int) -> None:
        self._most = most
        self._sequences = array("Q")
        self._marks = array("Q")

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, seq: int) -> bool:
        return self.get(seq) is not None

    def get(self, seq: int) -> int | None:
        """Return the fingerprint of a batch; ``None`` if it isn't remembered."""
        sequences = self._sequences
        if not sequences or not sequences[0] <= seq <= sequences[-1]:
            return None
        place = bisect_left(sequences, seq)
        return self._marks[place] if sequences[place] == seq else None

    @property
    def first(self) -> int | None:
        """The lowest sequence; ``None`` if there is none."""
        return self._sequences[0] if self._sequences else None

    def add(self, seq: int, mark: int) -> None:
        """Remember a batch, whose sequence is above all before it."""
        sequences, marks = self._sequences, self._marks
        sequences.append(seq)
        marks.append(mark)
        if len(sequences) > self._most:
            del sequences[0], marks[0]

    def clear(self) -> None:
        """Drop all."""
        del self._sequences[:], self._marks[:]
