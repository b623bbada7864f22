"""Workers in order of their load, so that the least loaded of any set is found without looking at all of them.

A set of workers is an integer, as everywhere in the index: slots are bits. With ten thousand workers that is a few hundred
machine words, so it isn't made for each of them. Most loads are one worker's alone, and such a slot stays a number; those that
many have, idle ones above all, are sets. Loads lie side by side in arrays: a search looks at few places of memory.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final, TypeAlias

from kvyard.index.bits import bits

Levels: TypeAlias = list[tuple[int, int]]
"""A number of blocks and the slots, as bits, that have just so many: most first, no slot twice, none that has nothing."""
FEW: Final = 32
"""Slots of a set that are looked at one by one, rather than all loads."""
_SOME: Final = 4
"""Loads to look at before a set is made into bytes, of which one is read at once."""


class Shelf:
    """Slots of one kind by a figure each, least first."""

    __slots__ = ("_many", "figures", "lones")

    def __init__(self) -> None:
        self.figures: array[float] = array("d")
        """Every figure that a slot has, once, in order."""
        self.lones: array[int] = array("q")
        """Beside each the slot that has it, where no other has or had it; else -1."""
        self._many: dict[float, int] = {}
        """The slots, as bits, of a figure that several had."""

    def add(self, slot: int, figure: float) -> None:
        """``slot``, which isn't here, has this figure."""
        many = self._many.get(figure)
        if many is not None:
            self._many[figure] = many | 1 << slot
            return
        at = bisect_left(self.figures, figure)
        if at < len(self.figures) and self.figures[at] == figure:
            self._many[figure] = 1 << slot | 1 << self.lones[at]
            self.lones[at] = -1
        else:
            self.figures.insert(at, figure)
            self.lones.insert(at, slot)

    def remove(self, slot: int, figure: float) -> None:
        """``slot``, which has this figure, isn't here any more."""
        many = self._many.get(figure)
        if many is not None:
            many ^= 1 << slot
            if many:
                self._many[figure] = many
                return
            del self._many[figure]
        at = bisect_left(self.figures, figure)
        del self.figures[at], self.lones[at]

    def many(self, figure: float) -> int:
        """The slots, as bits, of a figure that has no lone one."""
        return self._many[figure]

    def slots(self) -> Iterator[tuple[float, int]]:
        """Every figure, least first, and the slots, as bits, that have it."""
        for figure, lone in zip(self.figures, self.lones):
            yield figure, 1 << lone if lone >= 0 else self._many[figure]

    def least(self, among: int) -> tuple[float, int]:
        """The least figure of any slot of the set ``among``, and its slots that have it; 0 for none."""
        row = b""
        looked = 0
        for figure, slot in zip(self.figures, self.lones):
            if slot < 0:
                found = self._many[figure] & among
                if found:
                    return figure, found
                continue
            looked += 1
            if looked == _SOME:
                row = as_bytes(among)
            if is_in(row, slot) if row else among >> slot & 1:
                return figure, 1 << slot
        return 0.0, 0

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless figures and slots agree."""
        several = {figure for figure, lone in zip(self.figures, self.lones, strict=True) if lone < 0}
        assert list(self.figures) == sorted(set(self.figures)), "figures are out of order"
        assert several == self._many.keys(), "a figure of several slots that has a lone one"
        assert all(self._many.values()), "a figure that no slot has"


class Ranking:
    """Slots by shelf, and on each shelf by figure: one on a lower shelf comes first, whatever its figure."""

    __slots__ = ("_figure_of", "_shelf_of", "order", "shelves")

    def __init__(self) -> None:
        self.order: list[int] = []
        """The numbers of shelves, in order. There are few."""
        self.shelves: dict[int, Shelf] = {}
        self._shelf_of: list[int] = []
        """By slot; -1 for one that has no place."""
        self._figure_of: list[float] = []

    def put(self, slot: int, shelf: int, figure: float) -> None:
        """``slot`` has this place from now on."""
        while len(self._shelf_of) <= slot:
            self._shelf_of.append(-1)
            self._figure_of.append(0.0)
        before, had = self._shelf_of[slot], self._figure_of[slot]
        if before == shelf and had == figure:
            return
        if before >= 0:
            old = self.shelves[before]
            old.remove(slot, had)
            if not old.figures and before != shelf:
                del self.shelves[before]
                self.order.remove(before)
        self._shelf_of[slot], self._figure_of[slot] = shelf, figure
        new = self.shelves.get(shelf)
        if new is None:
            new = self.shelves[shelf] = Shelf()
            self.order.insert(bisect_left(self.order, shelf), shelf)
        new.add(slot, figure)

    def of(self, slot: int) -> tuple[int, float]:
        """The shelf and the figure of a slot that has a place."""
        assert self._shelf_of[slot] >= 0, f"slot {slot} has no place"
        return self._shelf_of[slot], self._figure_of[slot]

    def least(self, among: int) -> tuple[int, float, int]:
        """The first shelf and figure of any slot of the set ``among``, which isn't empty, and its slots that have just that."""
        if among.bit_count() <= FEW:
            found, first, low = 0, -1, 0.0
            for slot in bits(among):
                shelf, figure = self.of(slot)
                if not found or shelf < first or (shelf == first and figure < low):
                    found, first, low = 1 << slot, shelf, figure
                elif shelf == first and figure == low:
                    found |= 1 << slot
            return first, low, found
        for number in self.order:
            figure, found = self.shelves[number].least(among)
            if found:
                return number, figure, found
        raise AssertionError("a slot without a place")

    def firsts(self, among: int) -> list[tuple[int, float, int]]:
        """Of each shelf that has any slot of the set ``among``: its number, the least figure of those, and who has it."""
        out: list[tuple[int, float, int]] = []
        for number in self.order:
            figure, found = self.shelves[number].least(among)
            if found:
                out.append((number, figure, found))
        return out

    def counted(self, among: int) -> list[tuple[float, int]]:
        """Every figure of the first shelf, least first, with its slots of the set ``among``, where it has any: for figures that
        many share.
        """
        on = self.shelves[self.order[0]]
        return [(figure, slots & among) for figure, slots in on.slots() if slots & among]

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless shelves and slots agree."""
        assert self.order == sorted(self.shelves), "shelves are out of order"
        held = 0
        for number, on in self.shelves.items():
            on.check_integrity()
            for figure, slots in on.slots():
                held += slots.bit_count()
                for slot in bits(slots):
                    assert self.of(slot) == (number, figure), f"slot {slot} is out of place"
        assert held == sum(shelf >= 0 for shelf in self._shelf_of), "a slot has no place, or two"


def as_bytes(slots: int) -> bytes:
    """A set for many a question whether a slot is in it: see ``is_in``."""
    return slots.to_bytes((slots.bit_length() + 7) // 8, "little")


def is_in(row: bytes, slot: int) -> bool:
    """Whether ``slot`` is in a set."""
    at = slot >> 3
    return at < len(row) and bool(row[at] >> (slot & 7) & 1)


def of_slot(levels: Levels, slot: int) -> int:
    """How many blocks ``slot`` has."""
    for blocks, mask in levels:
        if mask >> slot & 1:
            return blocks
    return 0


def as_list(levels: Levels, count: int) -> list[int]:
    """The same for each of ``count`` slots."""
    out = [0] * count
    for blocks, mask in levels:
        for slot in bits(mask):
            out[slot] = blocks
    return out


def most(levels: Levels, among: int) -> tuple[int, int]:
    """The most blocks that a slot of the set ``among`` has, and those slots; nothing and none where none has any."""
    for blocks, mask in levels:
        if mask & among:
            return blocks, mask & among
    return 0, 0


def classes(levels: Levels, among: int) -> Levels:
    """The set ``among`` by how many blocks its slots have, those that have nothing last; no part is empty."""
    out: Levels = []
    for blocks, mask in levels:
        found = mask & among
        if found:
            out.append((blocks, found))
            among ^= found
    if among:
        out.append((0, among))
    return out


def nth_slot(mask: int, number: int) -> int:
    """The slot of a set that has ``number`` others of it before it."""
    at = 0
    width = mask.bit_length()
    while width > 1:
        half = width >> 1
        low = mask & ((1 << half) - 1)
        count = low.bit_count()
        if number < count:
            mask, width = low, half
        else:
            number -= count
            at += half
            mask >>= half
            width -= half
    return at


def lowest(mask: int) -> int:
    """The first slot of a set that isn't empty."""
    return (mask & -mask).bit_length() - 1


def highest(mask: int) -> int:
    """The last slot of a set that isn't empty."""
    return mask.bit_length() - 1
