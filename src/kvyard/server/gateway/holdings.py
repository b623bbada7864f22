"""Holdings: how many blocks the index knows of, by engine and tier, for people who watch.

An index has no reason to count. So this counts, a little with every look, and shows the last result of each place.
"""

from __future__ import annotations

from kvyard.index import Holder, Indexer
from kvyard.index.memory import MemoryIndex
from kvyard.server.dashboard.view import TierView
from kvyard.server.indexer.service import Service

AT_ONCE = 50_000
"""Blocks counted in one look; about a millisecond."""


class Holdings:
    """Counts round and round. One per gateway."""

    def __init__(self, index: Service) -> None:
        self._index = index
        self._blocks: dict[Holder, dict[tuple[str, int | None], int]] = {}
        """By holder, then by tier and attention group."""
        self._next: list[tuple[Indexer, Holder, int]] = []

    def look(self) -> None:
        """Count on."""
        if not self._next:
            self._next = self._places()
            there = {holder for _, holder, _ in self._next}
            self._blocks = {holder: blocks for holder, blocks in self._blocks.items() if holder in there}
        left = AT_ONCE
        while self._next and left > 0:
            indexer, holder, number = self._next.pop()
            if number in indexer.places.of(holder):
                place = indexer.places[number]
                count = sum(map(len, indexer.backend.held(number)))
                self._blocks.setdefault(holder, {})[place.tier.name, place.group] = count
                left -= count + 100

    def _places(self) -> list[tuple[Indexer, Holder, int]]:
        # Only what is in our own memory: asking Redis for everything once a minute would be a poor way to watch.
        return [
            (model.indexer, holder, number)
            for model in self._index.models.values()
            if isinstance(model.indexer.backend, MemoryIndex)
            for holder in list(model.indexer.places.holders())
            for number in model.indexer.places.of(holder)
        ]

    def tiers(self, holders: list[Holder]) -> list[TierView]:
        """What is known to be cached by these together."""
        found: dict[str, int] = {}
        for holder in holders:
            for (tier, _), count in self._blocks.get(holder, {}).items():
                found[tier] = found.get(tier, 0) + count
        return [TierView(name=tier, idle=count) for tier, count in sorted(found.items())]
