"""A consistent-hash ring of workers: few keys move when workers are added or removed."""

from bisect import bisect_left

import xxhash

from kvyard.index.bits import bits

_POINTS = 64
"""Places of each worker on the ring."""
_FEW = 32
"""Workers of which each is asked how far it is, rather than the ring who comes next."""


class HashRing:
    """Slots by the hash of a key. Takes in slots as it meets them."""

    def __init__(self) -> None:
        self._points: list[tuple[int, int]] = []
        self._of: list[list[int]] = []
        """By slot its places, in order."""

    def first(self, key: int, slots: int) -> int:
        """Return the slot, of a set given as bits and not empty, that comes first from the place of ``key`` on."""
        self._meet(slots.bit_length())
        start = xxhash.xxh3_64_intdigest(b"%d" % key)
        if slots.bit_count() <= _FEW:
            return min([(*self._distance(slot, start), slot) for slot in bits(slots)])[2]
        points = self._points
        place = bisect_left(points, (start, 0))
        while True:
            slot = points[place % len(points)][1]
            if slots >> slot & 1:
                return slot
            place += 1

    def _distance(self, slot: int, start: int) -> tuple[bool, int]:
        """Return true if ``slot`` comes only after the end of the ring, and its next place."""
        places = self._of[slot]
        index = bisect_left(places, start)
        return (False, places[index]) if index < len(places) else (True, places[0])

    def _meet(self, count: int) -> None:
        """Have places for all slots below ``count``."""
        if len(self._of) < count:
            for slot in range(len(self._of), count):
                places = [xxhash.xxh3_64_intdigest(b"%d:%d" % (slot, number)) for number in range(_POINTS)]
                self._points += [(place, slot) for place in places]
                self._of.append(sorted(places))
            self._points.sort()
