"""Workers in the order of a policy's rank, so that a search needn't visit all of them.

A set of workers is an integer, as everywhere in the index: slots are bits. With ten thousand workers that is a few hundred
machine words, so it isn't made for each of them. Most loads are one worker's alone, and its slot stays a number; those that
many have, idle ones above all, are sets. Loads lie side by side in arrays: a search looks at few places of memory.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from typing import TypeAlias

from kvyard.index.bits import bits

Levels: TypeAlias = list[tuple[int, int]]
"""A number of blocks and the slots, as bits, that have exactly as many: most first, no slot twice, none that has nothing."""


class Bucket:
    """Workers of one bucket, as slots, by a figure each, least first."""

    __slots__ = ("_many", "figures", "single_slots")

    def __init__(self) -> None:
        self.figures: array[float] = array("d")
        """Every figure that a slot has, once, in order."""
        self.single_slots: array[int] = array("q")
        """Beside each the slot that has it, where no other has or had it; else -1."""
        self._many: dict[float, int] = {}
        """The slots, as bits, of a figure that several had."""

    def add(self, slot: int, figure: float) -> None:
        """Add ``slot``, which isn't here, with this figure."""
        many = self._many.get(figure)
        if many is not None:
            self._many[figure] = many | 1 << slot
            return
        place = bisect_left(self.figures, figure)
        if place < len(self.figures) and self.figures[place] == figure:
            self._many[figure] = 1 << slot | 1 << self.single_slots[place]
            self.single_slots[place] = -1
        else:
            self.figures.insert(place, figure)
            self.single_slots.insert(place, slot)

    def remove(self, slot: int, figure: float) -> None:
        """Remove ``slot``, which has this figure."""
        many = self._many.get(figure)
        if many is not None:
            many ^= 1 << slot
            if many:
                self._many[figure] = many
                return
            del self._many[figure]
        place = bisect_left(self.figures, figure)
        del self.figures[place], self.single_slots[place]

    def many(self, figure: float) -> int:
        """Return the slots, as bits, of a figure that has no single one."""
        return self._many[figure]

    def slots(self) -> Iterator[tuple[float, int]]:
        """Yield every figure, least first, and the slots, as bits, that have it."""
        for figure, single in zip(self.figures, self.single_slots):
            yield figure, 1 << single if single >= 0 else self._many[figure]

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless figures and slots agree."""
        several = {figure for figure, single in zip(self.figures, self.single_slots, strict=True) if single < 0}
        assert list(self.figures) == sorted(set(self.figures)), "figures are out of order"
        assert several == self._many.keys(), "a figure of several slots that has a single one"
        assert all(self._many.values()), "a figure that no slot has"


class Ranking:
    """Workers, as slots, by the bucket and the figure that a policy's ``rank`` gives them."""

    __slots__ = ("_bucket_of", "_figure_of", "buckets", "order")

    def __init__(self) -> None:
        self.order: list[int] = []
        """The numbers of the buckets that have workers, in order. There are few."""
        self.buckets: dict[int, Bucket] = {}
        self._bucket_of: list[int] = []
        """By slot; -1 for one without a place."""
        self._figure_of: list[float] = []

    def put(self, slot: int, bucket: int, figure: float) -> None:
        """Move ``slot`` to this place."""
        while len(self._bucket_of) <= slot:
            self._bucket_of.append(-1)
            self._figure_of.append(0.0)
        before, had = self._bucket_of[slot], self._figure_of[slot]
        if before == bucket and had == figure:
            return
        if before >= 0:
            old = self.buckets[before]
            old.remove(slot, had)
            if not old.figures and before != bucket:
                del self.buckets[before]
                self.order.remove(before)
        self._bucket_of[slot], self._figure_of[slot] = bucket, figure
        new = self.buckets.get(bucket)
        if new is None:
            new = self.buckets[bucket] = Bucket()
            self.order.insert(bisect_left(self.order, bucket), bucket)
        new.add(slot, figure)

    def of(self, slot: int) -> tuple[int, float]:
        """Return the bucket and the figure of a slot that has a place."""
        assert self._bucket_of[slot] >= 0, f"slot {slot} has no place"
        return self._bucket_of[slot], self._figure_of[slot]

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless buckets and slots agree."""
        assert self.order == sorted(self.buckets), "buckets are out of order"
        held = 0
        for number, on in self.buckets.items():
            on.check_integrity()
            for figure, slots in on.slots():
                held += slots.bit_count()
                for slot in bits(slots):
                    assert self.of(slot) == (number, figure), f"slot {slot} is out of place"
        assert held == sum(bucket >= 0 for bucket in self._bucket_of), "a slot has no place, or two"


def as_bytes(slots: int) -> bytes:
    """Return a set in the form that ``is_in`` reads."""
    return slots.to_bytes((slots.bit_length() + 7) // 8, "little")


def is_in(row: bytes, slot: int) -> bool:
    """True if ``slot`` is in the set."""
    byte = slot >> 3
    return byte < len(row) and bool(row[byte] >> (slot & 7) & 1)


def of_slot(levels: Levels, slot: int) -> int:
    """Return the blocks that ``slot`` has."""
    for blocks, mask in levels:
        if mask >> slot & 1:
            return blocks
    return 0


def most(levels: Levels, among: int) -> tuple[int, int]:
    """Return the most blocks that a slot of the set ``among`` has, and those slots; nothing and none if none has any."""
    for blocks, mask in levels:
        if mask & among:
            return blocks, mask & among
    return 0, 0


def nth_slot(mask: int, number: int) -> int:
    """Return the slot of a set that has ``number`` others of it before it."""
    slot = 0
    width = mask.bit_length()
    while width > 1:
        half = width >> 1
        low = mask & ((1 << half) - 1)
        count = low.bit_count()
        if number < count:
            mask, width = low, half
        else:
            number -= count
            slot += half
            mask >>= half
            width -= half
    return slot


def lowest(mask: int) -> int:
    """Return the first slot of a set that isn't empty."""
    return (mask & -mask).bit_length() - 1
