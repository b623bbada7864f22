"""What a router can see of caches: per worker, how much of a prompt it has.

From the index, with predictions on top: a prefix that was sent somewhere is there soon, long before its events tell of it. Or,
for engines that announce nothing, from memory alone. A prediction ends when the index knows as much, or when its time is up.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvyard.index import Holder, Indexer, Roster
from kvyard.router.inputs import Overlaps
from kvyard.router.memory import RoutedMemory
from kvyard.router.request import RouteRequest
from kvyard.router.tree import Path


class OverlapView:
    """Overlaps by slot."""

    def __init__(
        self, block_size: int, indexer: Indexer | None, memory: RoutedMemory | None, predicted: RoutedMemory | None
    ) -> None:
        """``memory`` is looked at instead of the index, ``predicted`` besides it."""
        self.memory = memory
        self.predicted = predicted if memory is None else None
        self._size = block_size
        self._indexer = indexer
        self._roster: Roster | None = None
        self._count = 0
        self._path: Path = ([], 0)
        """The way of the prompt that was looked at last, in whichever memory there is."""

    def changed(self, workers: Sequence[Holder | None]) -> None:
        """These are the workers from now on, by slot."""
        self._count = len(workers)
        if self._indexer is not None:
            # A free slot is kept by a name that no worker can have, so that numbers stay what they are.
            self._roster = self._indexer.roster([worker or Holder("", -1) for worker in workers])

    def gone(self, slot: int) -> None:
        """Forget what that worker was sent."""
        for memory in (self.memory, self.predicted):
            if memory is not None:
                memory.remove(slot)

    def look(self, request: RouteRequest, now: int) -> Overlaps | None:
        """What each worker has of a prompt; ``None`` where nobody has anything."""
        if self.memory is not None:
            return self._remembered(self.memory, request, now)
        if self._roster is None:
            return None
        assert self._indexer is not None
        levels = self._indexer.reaches(self._roster, request.keys, request.num_tokens)
        known = self._by_tier(self._roster, levels) if levels else None
        memory = self.predicted
        if memory is None:
            return known
        memory.expire(now)
        self._path = memory.find(request.keys)
        return self._with_predictions(self._roster, request, known, memory) if self._path[0] else known

    def sent(self, slot: int, keys: Sequence[int], now: int) -> None:
        """The prompt that was looked at last went to ``slot``."""
        memory = self.memory or self.predicted
        if memory is not None:
            memory.remember(slot, keys, self._path, now)

    def heard(self, slot: int, keys: Sequence[int], now: int) -> None:
        """Somebody else sent a prompt to ``slot``."""
        memory = self.memory or self.predicted
        if memory is not None:
            memory.expire(now)
            memory.remember(slot, keys, memory.find(keys), now)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless what is remembered agrees with itself."""
        for memory in (self.memory, self.predicted):
            if memory is not None:
                memory.check_integrity()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _remembered(self, memory: RoutedMemory, request: RouteRequest, now: int) -> Overlaps | None:
        memory.expire(now)
        self._path = memory.find(request.keys)
        depths = memory.tree.depths(self._path, self._count)
        if depths is None:
            return None
        most = max(0, request.num_tokens - 1) // self._size  # engines always compute the last token
        return Overlaps([[depth if depth < most else most for depth in depths]])

    def _by_tier(self, roster: Roster, levels: list[list[int]]) -> Overlaps:
        """Reaches as what each tier adds to the closer ones."""
        before: list[int] | None = None
        tiers: list[list[int]] = []
        for tier, reach in zip(roster.tiers, levels, strict=True):
            while len(tiers) < tier - 1:
                tiers.append([0] * self._count)  # a tier that no worker has
            tiers.append(reach if before is None else [more - less for more, less in zip(reach, before, strict=True)])
            before = reach
        return Overlaps(tiers, None, roster.confidence)

    def _with_predictions(
        self, roster: Roster, request: RouteRequest, known: Overlaps | None, memory: RoutedMemory
    ) -> Overlaps | None:
        """Overlaps with what was routed since; what the index knows by now is struck off."""
        size = self._size
        depths = memory.tree.depths(self._path, self._count)
        assert depths is not None
        device = known.device if known is not None else [0] * self._count
        if known is not None:
            memory.confirm(self._path, device)
        most = max(0, request.num_tokens - 1)
        ahead: list[tuple[int, int]] = []
        for slot, depth in enumerate(depths):
            if depth > device[slot]:
                # What a hybrid model could use of it depends on what else its groups keep: only events tell.
                alignment = roster.alignments[slot]
                usable = min(depth * size, most) // alignment * alignment // size if alignment else 0
                if usable > device[slot]:
                    ahead.append((slot, usable))
        if not ahead:
            return known
        announced, device = device, device.copy()
        lower = [tier.copy() for tier in known.tiers[1:]] if known is not None else []
        for slot, usable in ahead:
            more, device[slot] = usable - device[slot], usable
            for tier in lower:
                less = min(more, tier[slot])
                tier[slot] -= less
                more -= less
        return Overlaps([device, *lower], announced, known.confidence if known is not None else None)
