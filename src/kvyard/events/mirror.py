"""A mirror: the map of copies as a consumer of the stream believes it to be.

It is the smallest correct consumer, and the yardstick of the stream: after every iteration it equals the producer's map.
It keeps sets of hashes and nothing else; for routing use ``kvyard.index``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from kvyard.events.types import Cleared, Event, Removed, Stored, Tier
from kvyard.hashing import Key

Place: TypeAlias = tuple[int | None, Tier]


class Mirror:
    """Which hashes are held per (group, tier), as far as the events say."""

    def __init__(self) -> None:
        self.held: dict[Place, set[Key]] = {}
        """Places with nothing in them are left out."""
        self.repeated = 0
        """Hashes stored where they were held already."""
        self.unknown = 0
        """Hashes removed where they weren't held."""

    def apply(self, events: Iterable[Event]) -> None:
        """Take in ``events`` in order."""
        for event in events:
            if isinstance(event, Stored):
                if not event.hashes:
                    continue
                held = self.held.setdefault((event.group, event.tier), set())
                before = len(held)
                held.update(event.hashes)
                self.repeated += before + len(event.hashes) - len(held)
            elif isinstance(event, Removed):
                place = (event.group, event.tier)
                held = self.held.get(place, set())
                before = len(held)
                held.difference_update(event.hashes)
                self.unknown += len(event.hashes) - (before - len(held))
                if not held:
                    self.held.pop(place, None)
            else:
                self.clear(event)

    def clear(self, event: Cleared) -> None:
        """Forget what ``event`` says is gone."""
        if event.tier is None:
            self.held.clear()
        else:
            for place in [place for place in self.held if place[1] == event.tier]:
                del self.held[place]

    def closest(self) -> dict[int | None, dict[Key, Tier]]:
        """Per group the closest tier that holds each hash: all that a wire with exclusive tiers can say."""
        out: dict[int | None, dict[Key, Tier]] = {}
        for (group, tier), held in sorted(self.held.items(), key=lambda item: -item[0][1]):
            out.setdefault(group, {}).update(dict.fromkeys(held, tier))
        return out
