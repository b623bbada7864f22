"""A mirror: what a stream has announced and not taken back, which is what a reader of all its batches holds.

After every iteration it equals the producer's map of copies (I4). It also keeps the announcement that each block came with:
parents, tokens and namespaces. So a publisher can announce everything again to a reader that comes late, without asking the
engine. For routing use ``kvyard.index``.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import msgspec

from kvyard.events.packed import PackedEvents
from kvyard.events.types import Cleared, Event, Removed, Stored, Tier
from kvyard.hashing import Key

Place: TypeAlias = tuple[int | None, Tier]
"""Group and tier."""


class _Announcement:
    """One Stored event, as long as any of its blocks is held."""

    __slots__ = ("event", "hashes", "tokens")

    def __init__(self, event: Stored) -> None:
        self.tokens = _compact(event.tokens)
        self.hashes = [*event.hashes]  # packed ones can't be sliced
        self.event = msgspec.structs.replace(event, tokens=None, hashes=self.hashes)


class Mirror:
    """Hashes held per (group, tier), according to events."""

    def __init__(self) -> None:
        self.repeated = 0
        """Hashes stored where they were held already."""
        self.unknown = 0
        """Hashes removed where they weren't held."""
        self._held: dict[Place, dict[Key, _Announcement]] = {}

    @property
    def blocks(self) -> int:
        """Return the number of (hash, group, tier) held."""
        return sum(map(len, self._held.values()))

    @property
    def held(self) -> dict[Place, set[Key]]:
        """The hashes per place, made now; places with nothing in them are left out."""
        return {place: set(hashes) for place, hashes in self._held.items()}

    def clear(self) -> None:
        """Remove everything, as a restarted engine has nothing."""
        self._held.clear()

    def apply(self, events: Iterable[Event]) -> None:
        """Take in ``events`` in order."""
        for event in events:
            if isinstance(event, Stored):
                if event.hashes:
                    self._store(event)
            elif isinstance(event, Removed):
                self._remove(event)
            elif event.tier is None:
                self._held.clear()
            else:
                for place in [place for place in self._held if place[1] == event.tier]:
                    del self._held[place]

    def events(self) -> list[Event]:
        """Return a clear, then everything held: place by place, parents first, each run of one announcement as one Stored."""
        out: list[Event] = [Cleared()]
        for place in sorted(self._held, key=lambda place: (-1 if place[0] is None else place[0], place[1])):
            out += _parents_first(_runs(self._held[place]))
        return out

    def _store(self, event: Stored) -> None:
        held = self._held.setdefault((event.group, event.tier), {})
        before = len(held)
        announcement = _Announcement(event)
        if event.tokens is None:
            # Hashes alone must not replace an announcement that says more.
            for key in announcement.hashes:
                held.setdefault(key, announcement)
        else:
            held.update(dict.fromkeys(announcement.hashes, announcement))
        self.repeated += before + len(announcement.hashes) - len(held)

    def _remove(self, event: Removed) -> None:
        place = (event.group, event.tier)
        held = self._held.get(place, {})
        before = len(held)
        for key in event.hashes:
            held.pop(key, None)
        self.unknown += len(event.hashes) - (before - len(held))
        if not held:
            self._held.pop(place, None)


def _runs(announced: dict[Key, _Announcement]) -> Iterator[Stored]:
    """Yield every held block once, in consecutive runs of the event it came with, events in order of their first block."""
    for announcement in dict.fromkeys(announced.values()):
        hashes = announcement.hashes
        start = 0
        for index in range(len(hashes) + 1):
            if index < len(hashes) and announced.get(hashes[index]) is announcement:
                continue
            if start < index:
                yield _slice(announcement, start, index)
            start = index + 1


def _slice(announcement: _Announcement, start: int, stop: int) -> Stored:
    event, hashes, tokens = announcement.event, announcement.hashes, announcement.tokens
    if start == 0 and stop == len(hashes):
        return event if tokens is None else msgspec.structs.replace(event, tokens=list(tokens))
    size, extras = event.block_size, event.extra_keys
    part: list[int] | None = None
    if tokens is not None and len(tokens) == size * len(hashes):
        part = list(tokens[start * size : stop * size])
    return msgspec.structs.replace(
        event,
        hashes=hashes[start:stop],
        parent=hashes[start - 1] if start else event.parent,
        tokens=part,
        extra_keys=extras[start:stop] if extras is not None else None,
    )


def _parents_first(runs: Iterable[Stored]) -> list[Stored]:
    """Reorder ``runs`` so that a run whose parent is in another comes after it.

    They are runs of paths in a tree, so there is no cycle among them.
    """
    waiting = list(runs)
    home = {key: index for index, event in enumerate(waiting) for key in event.hashes}
    out: list[Stored] = []
    done = [False] * len(waiting)
    for first in range(len(waiting)):
        line = []
        number: int | None = first
        while number is not None and not done[number]:
            done[number] = True
            line.append(waiting[number])
            parent = waiting[number].parent
            number = home.get(parent) if parent is not None else None
        out += reversed(line)
    return out


def _compact(tokens: Sequence[int] | None) -> Sequence[int] | None:
    """Return tokens at four bytes each where they fit: a mirror keeps them for as long as blocks are held."""
    if tokens is None or isinstance(tokens, array):
        return tokens
    try:
        return array("I", tokens)
    except (OverflowError, TypeError):
        return list(tokens)


def restates(events: Iterable[Event]) -> bool:
    """Return true if a batch makes everything before it irrelevant: it clears all tiers."""
    if isinstance(events, PackedEvents):
        return events.restates
    return any(isinstance(event, Cleared) and event.tier is None for event in events)
