"""A ring of hashes with workers on it: who gets a key hardly changes when workers come and go."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

import xxhash

_POINTS = 64
"""Places of each worker on the ring."""


class HashRing:
    """Slots by the hash of a key. Takes in slots as it meets them."""

    def __init__(self) -> None:
        self._points: list[tuple[int, int]] = []
        self._known: set[int] = set()

    def walk(self, key: int, slots: Sequence[int]) -> Iterator[int]:
        """Those of ``slots``, each once, from the place of ``key`` on."""
        for slot in slots:
            if slot not in self._known:
                self._known.add(slot)
                for number in range(_POINTS):
                    insort(self._points, (xxhash.xxh3_64_intdigest(b"%d:%d" % (slot, number)), slot))
        place = bisect_left(self._points, (xxhash.xxh3_64_intdigest(b"%d" % key), 0))
        left = set(slots)
        for at in range(len(self._points)):
            slot = self._points[(place + at) % len(self._points)][1]
            if slot in left:
                left.remove(slot)
                yield slot
            if not left:
                return
