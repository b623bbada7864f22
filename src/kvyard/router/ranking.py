"""Workers in order of their load, so that the least loaded of any set is found without looking at all of them.

Slots with an equal rank are the bits of one number, as everywhere in the index: a set of workers is an integer, and the least
loaded of a set is the first rank that has a bit in common with it. Ten thousand workers are then a few hundred machine words.
"""

from bisect import bisect_left
from typing import Final, TypeAlias

from kvyard.index.places import bits

Rank: TypeAlias = tuple[int, float]
"""What slots are ordered by, least first."""
Levels: TypeAlias = list[tuple[int, int]]
"""A number of blocks and the slots, as bits, that have just so many: most first, no slot twice, none that has nothing."""
FEW: Final = 32
"""Slots of a set that are looked at one by one, rather than all ranks."""


class Ranking:
    """Ranks by slot, and slots by rank."""

    __slots__ = ("_bits", "_of", "masks", "ranks")

    def __init__(self) -> None:
        self.ranks: list[Rank] = []
        """Every rank that a slot has, in order."""
        self.masks: dict[Rank, int] = {}
        """The slots of each."""
        self._of: list[Rank | None] = []
        self._bits: list[int] = []

    def put(self, slot: int, rank: Rank) -> None:
        """``slot`` has this rank from now on."""
        while len(self._of) <= slot:
            self._bits.append(1 << len(self._of))
            self._of.append(None)
        before = self._of[slot]
        if before == rank:
            return
        bit, masks = self._bits[slot], self.masks
        if before is not None:
            left = masks[before] ^ bit
            if left:
                masks[before] = left
            else:
                del masks[before]
                del self.ranks[bisect_left(self.ranks, before)]
        self._of[slot] = rank
        known = masks.get(rank)
        if known is None:
            masks[rank] = bit
            self.ranks.insert(bisect_left(self.ranks, rank), rank)
        else:
            masks[rank] = known | bit

    def of(self, slot: int) -> Rank:
        """The rank of a slot that has one."""
        rank = self._of[slot]
        assert rank is not None, f"slot {slot} has no rank"
        return rank

    def least(self, among: int) -> tuple[Rank, int]:
        """The least rank of any slot of the set ``among``, which isn't empty, and those slots of it that have that one."""
        if among.bit_count() <= FEW:
            found, rank = 0, (0, 0.0)
            for slot in bits(among):
                mine = self.of(slot)
                if not found or mine < rank:
                    found, rank = self._bits[slot], mine
                elif mine == rank:
                    found |= self._bits[slot]
            return rank, found
        for rank in self.ranks:
            found = self.masks[rank] & among
            if found:
                return rank, found
        raise AssertionError("a slot without a rank")

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless ranks and slots agree."""
        assert self.ranks == sorted(self.masks), "ranks are out of order"
        for slot, rank in enumerate(self._of):
            assert rank is None or self.masks[rank] >> slot & 1, f"slot {slot} isn't among those of its rank"
        assert sum(mask.bit_count() for mask in self.masks.values()) == len(
            [one for one in self._of if one is not None]
        )


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
