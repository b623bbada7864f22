"""What waits: stores whose parent nobody has named yet, and hashes without text. Bounded; the oldest go first.

An index that starts in the middle of a stream, or whose stream reorders groups, would otherwise lose such stores for good,
and all that continues them (llm-d #372).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvyard.events.types import Stored
from kvyard.hashing import Key


class _Orphan:
    __slots__ = ("event", "gone", "place")

    def __init__(self, place: int, event: Stored) -> None:
        self.place = place
        self.event = event
        self.gone: list[Key] = []
        """Hashes of it that were removed meanwhile."""


class Waiting:
    """Of one feed. ``limit`` bounds the hashes that wait."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.dropped = 0
        """Hashes that waited too long."""
        self._orphans: dict[Key, list[_Orphan]] = {}
        self._orphan_of: dict[tuple[int, Key], _Orphan] = {}
        self._nameless: dict[Key, dict[int, int]] = {}
        """Per hash how often each place announced it."""

    def __len__(self) -> int:
        return len(self._orphan_of) + len(self._nameless)

    def __bool__(self) -> bool:
        return bool(self._orphans or self._nameless)

    def add_orphan(self, place: int, event: Stored) -> None:
        """``event`` waits for its parent."""
        assert event.parent is not None
        orphan = _Orphan(place, event)
        self._orphans.setdefault(event.parent, []).append(orphan)
        for key in event.hashes:
            self._orphan_of[place, key] = orphan
        self._bound()

    def add_nameless(self, place: int, hashes: Sequence[Key]) -> None:
        """``hashes`` wait for somebody to say what they name."""
        for key in hashes:
            places = self._nameless.setdefault(key, {})
            places[place] = places.get(place, 0) + 1
        self._bound()

    def named(self, hashes: Sequence[Key]) -> Iterator[tuple[int, list[Key]]]:
        """``hashes`` have a text now: the places that announced some of them, once per announcement. They wait no longer."""
        if not self._nameless:
            return
        ready: dict[int, list[list[Key]]] = {}
        for key in hashes:
            for place, count in self._nameless.pop(key, {}).items():
                rounds = ready.setdefault(place, [])
                while len(rounds) < count:
                    rounds.append([])
                for turn in range(count):
                    rounds[turn].append(key)
        for place, rounds in ready.items():
            for keys in rounds:
                yield place, keys

    def parented(self, hashes: Sequence[Key]) -> Iterator[tuple[Stored, list[Key]]]:
        """``hashes`` are known now: the stores that continue them, and what was removed of each meanwhile."""
        if not self._orphans:
            return
        for key in hashes:
            for orphan in self._orphans.pop(key, ()):
                self._unlist(orphan)
                yield orphan.event, orphan.gone

    def undo(self, place: int, hashes: Sequence[Key]) -> list[Key]:
        """``hashes`` were removed: those that wait no longer do. Returns the others."""
        rest: list[Key] = []
        for key in hashes:
            orphan = self._orphan_of.get((place, key))
            places = self._nameless.get(key)
            if orphan is not None:
                orphan.gone.append(key)
            elif places is not None and place in places:
                places[place] -= 1
                if not places[place]:
                    del places[place]
                    if not places:
                        del self._nameless[key]
            else:
                rest.append(key)
        return rest

    def clear(self, place: int) -> None:
        """Nothing waits for ``place`` any more."""
        for parent in list(self._orphans):
            kept = [orphan for orphan in self._orphans[parent] if orphan.place != place]
            for orphan in self._orphans[parent]:
                if orphan.place == place:
                    self._unlist(orphan)
            if kept:
                self._orphans[parent] = kept
            else:
                del self._orphans[parent]
        for key in list(self._nameless):
            self._nameless[key].pop(place, None)
            if not self._nameless[key]:
                del self._nameless[key]

    def clear_all(self) -> None:
        """Nothing waits."""
        self._orphans.clear()
        self._orphan_of.clear()
        self._nameless.clear()

    def _unlist(self, orphan: _Orphan) -> None:
        for key in orphan.event.hashes:
            if self._orphan_of.get((orphan.place, key)) is orphan:
                del self._orphan_of[orphan.place, key]

    def _bound(self) -> None:
        while len(self) > self.limit:
            if self._nameless:
                del self._nameless[next(iter(self._nameless))]
                self.dropped += 1
            else:
                parent = next(iter(self._orphans))
                for orphan in self._orphans.pop(parent):
                    self._unlist(orphan)
                    self.dropped += len(orphan.event.hashes)
