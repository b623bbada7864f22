"""The index as one would write it down in ten minutes: a set per place. What every backend is held against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvyard.index.backend import Rows, Usage
from kvyard.index.rows import joined


class NaiveIndex:
    """A ``IndexBackend`` that is obviously right."""

    def __init__(self) -> None:
        self.sets: dict[int, dict[int, None]] = {}

    def store(self, place: int, keys: Sequence[int], parent: int | None = None) -> Sequence[int]:
        held = self.sets.setdefault(place, {})
        repeated = []
        for key in keys:
            if key in held:
                repeated.append(key)
            held[key] = None
        return repeated

    def remove(self, place: int, keys: Sequence[int]) -> int:
        held = self.sets.get(place, {})
        return sum(held.pop(key, 0) is None for key in keys)

    def clear(self, place: int) -> int:
        return len(self.sets.pop(place, {}))

    def lookup(self, keys: Sequence[int], through_holes: bool = False) -> Rows:
        rows: Rows = []
        for at, key in enumerate(keys):
            mask = sum(1 << place for place, held in self.sets.items() if key in held)
            if not mask and not through_holes:
                break
            rows.append((at + 1, mask))
        return joined(rows)

    def holds(self, place: int, key: int) -> bool:
        return key in self.sets.get(place, {})

    def held(self, place: int) -> Iterator[Sequence[int]]:
        for key in self.sets.get(place, {}):
            yield [key]

    def usage(self) -> Usage:
        blocks = {key for held in self.sets.values() for key in held}
        return Usage(blocks=len(blocks))

    def check_integrity(self) -> None:
        pass
