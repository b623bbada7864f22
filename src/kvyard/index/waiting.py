"""Part of a stream that waits to be resolved: stores whose parent isn't known yet, and hashes without text."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec

from kvyard.events.types import Stored
from kvyard.hashing import Key

Orphaned: TypeAlias = tuple[int, Stored, list[Key]]
"""For a snapshot: a place, a store whose parent isn't known, and the hashes of it that were removed meanwhile."""
Nameless: TypeAlias = tuple[Key, list[tuple[int, int]]]
"""For a snapshot: a hash without text, and how often each place announced it."""


class _Orphan(msgspec.Struct, eq=False):
    place: int
    event: Stored
    gone: list[Key] = []
    """Hashes of it that were removed meanwhile."""


class WaitingStores:
    """Stores whose parent isn't known yet, and hashes without text. Bounded; the oldest go first.

    An index that starts in the middle of a stream, or whose stream reorders groups, would otherwise lose these stores for
    good, and all that continues them (llm-d #372).
    """

    def __init__(self, limit: int) -> None:
        """``limit`` bounds the hashes that wait."""
        self.limit = limit
        self.dropped = 0
        """Hashes that waited too long."""
        self._orphans: dict[Key, list[_Orphan]] = {}
        """By parent."""
        self._orphaned = 0
        """Hashes of all of them."""
        self._announcing: dict[tuple[int, Key], list[_Orphan]] = {}
        """Per place and hash the orphans that a removal can still be about: each once."""
        self._nameless: dict[Key, dict[int, int]] = {}
        """Per hash how often each place announced it."""

    def __len__(self) -> int:
        return self._orphaned + len(self._nameless)

    def __bool__(self) -> bool:
        return bool(self._orphans or self._nameless)

    def add_orphan(self, place: int, event: Stored) -> None:
        """Keep ``event`` until its parent is known."""
        self._add(_Orphan(place, event))
        self._bound()

    def add_nameless(self, place: int, hashes: Sequence[Key]) -> None:
        """Keep ``hashes`` until a store names their content."""
        for key in hashes:
            places = self._nameless.setdefault(key, {})
            places[place] = places.get(place, 0) + 1
        self._bound()

    def named(self, hashes: Sequence[Key]) -> Iterator[tuple[int, list[Key]]]:
        """``hashes`` have a text now: the places that announced some of them, once per announcement. They wait no longer."""
        if not self._nameless:
            return
        ready: dict[tuple[int, int], list[Key]] = {}
        for key in hashes:
            for place, count in self._nameless.pop(key, {}).items():
                for turn in range(count):
                    ready.setdefault((place, turn), []).append(key)
        for (place, _), keys in ready.items():
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
        """``hashes`` were removed: one announcement of each that waits no longer does. Returns the others."""
        rest: list[Key] = []
        for key in hashes:
            orphans = self._announcing.get((place, key))
            places = self._nameless.get(key)
            if orphans:
                orphans.pop(0).gone.append(key)
                if not orphans:
                    del self._announcing[place, key]
            elif places is not None and place in places:
                places[place] -= 1
                if not places[place]:
                    self._forget_nameless(key, place)
            else:
                rest.append(key)
        return rest

    def clear(self, place: int) -> None:
        """Discard everything that waits for ``place``."""
        for parent, orphans in list(self._orphans.items()):
            for orphan in orphans:
                if orphan.place == place:
                    self._unlist(orphan)
            self._orphans[parent] = [orphan for orphan in orphans if orphan.place != place]
            if not self._orphans[parent]:
                del self._orphans[parent]
        for key in list(self._nameless):
            self._forget_nameless(key, place)

    def clear_all(self) -> None:
        """Discard everything that waits."""
        self._orphans.clear()
        self._announcing.clear()
        self._nameless.clear()
        self._orphaned = 0

    def snapshot(self, numbers: Mapping[int, int]) -> tuple[list[Orphaned], list[Nameless]]:
        """Return everything that waits, with the ``numbers`` of places."""
        orphans = [
            (numbers[orphan.place], _plain(orphan.event), list(orphan.gone))
            for orphans in self._orphans.values()
            for orphan in orphans
        ]
        nameless = [
            (key, [(numbers[place], count) for place, count in places.items()])
            for key, places in self._nameless.items()
        ]
        return orphans, nameless

    def restore(self, numbers: Sequence[int], orphans: Iterable[Orphaned], nameless: Iterable[Nameless]) -> None:
        """Queue the stores of a snapshot, whose places have these ``numbers`` here."""
        for number, event, gone in orphans:
            self._add(_Orphan(numbers[number], event))
            self.undo(numbers[number], gone)
        for key, places in nameless:
            self._nameless[key] = {numbers[number]: count for number, count in places}
        self._bound()

    def _add(self, orphan: _Orphan) -> None:
        event = orphan.event
        assert event.parent is not None
        self._orphans.setdefault(event.parent, []).append(orphan)
        self._orphaned += len(event.hashes)
        for key in event.hashes:
            self._announcing.setdefault((orphan.place, key), []).append(orphan)

    def _unlist(self, orphan: _Orphan) -> None:
        """Remove an orphan that no longer waits."""
        self._orphaned -= len(orphan.event.hashes)
        for key in orphan.event.hashes:
            orphans = self._announcing.get((orphan.place, key), [])
            if orphan in orphans:
                orphans.remove(orphan)
                if not orphans:
                    del self._announcing[orphan.place, key]

    def _forget_nameless(self, key: Key, place: int) -> None:
        places = self._nameless[key]
        places.pop(place, None)
        if not places:
            del self._nameless[key]

    def _bound(self) -> None:
        while len(self) > self.limit:
            if self._nameless:
                del self._nameless[next(iter(self._nameless))]
                self.dropped += 1
            else:
                for orphan in self._orphans.pop(next(iter(self._orphans))):
                    self._unlist(orphan)
                    self.dropped += len(orphan.event.hashes)


def _plain(event: Stored) -> Stored:
    """Return ``event`` with lists in place of what packs its hashes and tokens."""
    tokens = None if event.tokens is None else list(event.tokens)
    return msgspec.structs.replace(event, hashes=list(event.hashes), tokens=tokens)
