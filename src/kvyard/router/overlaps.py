"""What a router can see of caches: per worker, how much of a prompt it has.

From the index, with predictions on top: a prefix that was sent somewhere is there soon, long before its events tell of it. Or,
for engines that announce nothing, from memory alone. A prediction ends when the index knows as much, or when its time is up.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

from kvyard.events.types import Tier
from kvyard.index import Holder, Identity, Roster
from kvyard.router.inputs import Overlaps, Parts, PrefixLevels, Reach
from kvyard.router.memory import RoutedMemory
from kvyard.router.ranking import Levels, classes
from kvyard.router.request import RouteRequest
from kvyard.router.tree import Path


class PrefixIndex(Protocol):
    """All that a router asks of an index in its own process: ``kvyard.index.Indexer``, or ``RunIndexer`` in a replay."""

    @property
    def identity(self) -> Identity:
        """How it names blocks, and their size."""

    def roster(self, workers: Sequence[Holder]) -> Roster:
        """Workers by slot, to ask ``reaches`` about."""

    def reaches(self, roster: Roster, keys: Sequence[int], tokens: int | None = None) -> list[list[int]]:
        """Per tier and worker of ``roster`` how many blocks of a prompt it could use; see ``Roster.reaches``."""

    def is_flat(self, roster: Roster) -> bool:
        """Whether ``levels`` has an answer about ``roster`` now."""

    def levels(
        self, roster: Roster, keys: Sequence[int], tokens: int | None = None
    ) -> list[list[tuple[int, int]]] | None:
        """The same by lengths, each with the workers that have just so much; see ``Roster.levels``."""


Known: TypeAlias = Mapping[Holder, Reach]
"""What an index elsewhere says of one prompt, by worker. Those it doesn't name have nothing."""
_NOTHING = Reach((0,))


class OverlapView:
    """Overlaps by slot."""

    def __init__(
        self, block_size: int, indexer: PrefixIndex | None, memory: RoutedMemory | None, alone: bool = False
    ) -> None:
        """``memory`` is of what was routed. It adds predictions to what an index knows, or, ``alone``, is all there is."""
        self.memory = memory
        self._alone = alone
        self._size = block_size
        self._indexer = indexer
        self._roster: Roster | None = None
        self._workers: Sequence[Holder | None] = ()
        self._path: Path = ([], 0)
        """The way of the prompt that was looked at last, in the memory."""

    def changed(self, workers: Sequence[Holder | None]) -> None:
        """These are the workers from now on, by slot."""
        self._workers = tuple(workers)
        if self._indexer is not None:
            # A free slot is kept by a name that no worker can have, so that numbers stay what they are.
            self._roster = self._indexer.roster([worker or Holder("", -1) for worker in workers])

    def gone(self, slot: int) -> None:
        """Forget what that worker was sent."""
        if self.memory is not None:
            self.memory.tree.remove(slot)

    def look(self, request: RouteRequest, now: int, told: Known | None = None) -> Overlaps | None:
        """What each worker has of a prompt; ``None`` where none has anything. ``told`` counts instead of the index."""
        memory = self.memory
        if memory is not None:
            memory.expire(now)
            self._path = memory.tree.find(request.keys)
            if self._alone:
                return self._remembered(memory, request)
        known: Overlaps | None = None
        alignments: list[int] | None = None
        if told is not None:
            known = self._told(told)
        elif self._indexer is not None and self._roster is not None:
            roster = self._roster
            levels = self._indexer.reaches(roster, request.keys, request.num_tokens)
            known = self._by_tier(roster.tiers, levels, roster.confidence) if levels else None
            alignments = roster.alignments
        if memory is None or not self._path[0]:
            return known
        return self._with_predictions(alignments, request, known, memory)

    def is_flat(self, told: Known | None) -> bool:
        """Whether ``look_levels`` has an answer."""
        if self._alone:
            return True
        if told is not None or self._indexer is None or self._roster is None:
            return told is None and self.memory is None  # then no worker is known to have anything
        return self._indexer.is_flat(self._roster)

    def look_levels(self, request: RouteRequest, now: int) -> PrefixLevels | None:
        """``look`` by how much workers have (``is_flat``). It costs by branches, not workers."""
        memory, roster = self.memory, self._roster
        ahead: Levels = []
        if memory is not None:
            memory.expire(now)
            self._path = memory.tree.find(request.keys)
            if self._path[0]:
                steps = roster.steps if roster is not None and not self._alone else []
                ahead = self._ahead(memory.tree.levels(self._path), request, steps)
                if self._alone:
                    return PrefixLevels(ahead)
            if self._alone:
                return None
        if self._indexer is None or roster is None:
            return None
        told = self._indexer.levels(roster, request.keys, request.num_tokens)
        device: Levels | None = None
        if told is not None:
            device = told[0] if roster.tiers[0] == Tier.G1 else []
        if memory is not None and self._path[0] and device is not None:
            memory.confirm_levels(self._path, device)
        if told is None or (len(told) == 1 and roster.tiers[0] == Tier.G1):
            if not ahead:
                return None if device is None else PrefixLevels(device)
            return _joined(ahead, device)
        assert device is not None
        return _with_tiers(ahead, device, _parts(roster.tiers, told), int(roster.tiers[-1]))

    def sent(self, slot: int, keys: Sequence[int], now: int) -> int:
        """The prompt that was looked at last went to ``slot``. Returns a number by which it can be taken back, or 0."""
        return 0 if self.memory is None else self.memory.remember(slot, keys, self._path, now)

    def heard(self, slot: int, keys: Sequence[int], now: int) -> int:
        """Another router sent a prompt to ``slot``. Returns as ``sent`` does."""
        memory = self.memory
        if memory is None:
            return 0
        memory.expire(now)
        return memory.remember(slot, keys, memory.tree.find(keys), now)

    def take_back(self, number: int) -> None:
        """The worker that was sent a prompt never computed it."""
        if self.memory is not None and number:
            self.memory.take_back(number)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _ahead(self, depths: Levels, request: RouteRequest, steps: Sequence[tuple[int, int]]) -> Levels:
        """What workers could use of what they were sent; ``steps`` are the roster's."""
        size, most = self._size, max(0, request.num_tokens - 1)  # engines always compute the last token
        ahead: Levels = []
        for depth, mask in depths:
            for step, members in steps:
                found = mask & members
                # What a hybrid model could use of it depends on what else its groups keep: only events tell.
                if found and step:
                    _have(ahead, min(depth * size, most) // step * step // size, found)
                mask ^= found
            if mask:
                _have(ahead, min(depth, most // size), mask)
        if steps:
            ahead.sort(key=_blocks_of, reverse=True)
        return ahead

    def _remembered(self, memory: RoutedMemory, request: RouteRequest) -> Overlaps | None:
        depths = memory.tree.depths(self._path, len(self._workers))
        if depths is None:
            return None
        most = max(0, request.num_tokens - 1) // self._size  # engines always compute the last token
        return Overlaps([[depth if depth < most else most for depth in depths]])

    def _told(self, told: Known) -> Overlaps | None:
        if not told:
            return None
        rows = [told.get(worker, _NOTHING) if worker is not None else _NOTHING for worker in self._workers]
        depth = max(len(row.tiers) for row in rows)
        levels = [[row.tiers[min(level, len(row.tiers) - 1)] for row in rows] for level in range(depth)]
        sure = [row.confidence for row in rows]
        return self._by_tier(list(Tier)[:depth], levels, sure if min(sure, default=1.0) < 1 else None)

    def _by_tier(self, tiers: list[Tier], levels: list[list[int]], confidence: list[float] | None) -> Overlaps:
        """Reaches as what each tier adds to the closer ones."""
        before: list[int] | None = None
        parts: list[list[int]] = []
        for tier, reach in zip(tiers, levels, strict=True):
            while len(parts) < tier - 1:
                parts.append([0] * len(self._workers))  # a tier that no worker has
            parts.append(reach if before is None else [more - less for more, less in zip(reach, before, strict=True)])
            before = reach
        return Overlaps(parts, None, confidence)

    def _with_predictions(
        self, alignments: list[int] | None, request: RouteRequest, known: Overlaps | None, memory: RoutedMemory
    ) -> Overlaps | None:
        """Overlaps with what was routed since; what the index knows by now is struck off.

        ``alignments`` are the roster's; without one a prefix may end with any block.
        """
        size = self._size
        depths = memory.tree.depths(self._path, len(self._workers))
        assert depths is not None
        device = known.device if known is not None else [0] * len(self._workers)
        if known is not None:
            memory.confirm(self._path, device)
        most = max(0, request.num_tokens - 1)
        ahead: list[tuple[int, int]] = []
        for slot, depth in enumerate(depths):
            if depth > device[slot]:
                # What a hybrid model could use of it depends on what else its groups keep: only events tell.
                alignment = alignments[slot] if alignments is not None else size
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


def _joined(ahead: Levels, known: Levels | None) -> PrefixLevels | None:
    """What is ``known`` with predictions that go beyond it; ``None`` where there is neither."""
    left = known or []
    more: Levels = []
    for blocks, mask in ahead:
        for length, holders in left:
            if length < blocks:
                break
            mask &= ~holders
        if mask:
            more.append((blocks, mask))
    if not more:
        return None if known is None else PrefixLevels(known)
    lifted = 0
    for _, mask in more:
        lifted |= mask
    for blocks, mask in left:
        if mask & ~lifted:
            more.append((blocks, mask & ~lifted))
    more.sort(key=_blocks_of, reverse=True)
    levels: Levels = []
    for blocks, mask in more:
        _have(levels, blocks, mask)
    return PrefixLevels(levels, left)


def _parts(tiers: Sequence[Tier], reaches: Sequence[Levels]) -> Parts:
    """How far each tier reaches with all closer ones, as what each adds: workers by all of their figures together."""
    # A tier reaches at least as far as those before it, so the last one has everyone that has anything.
    found: list[tuple[list[int], int]] = [([blocks], mask) for blocks, mask in reaches[-1]]
    for levels in reversed(reaches[:-1]):
        finer: list[tuple[list[int], int]] = []
        for reach, mask in found:
            for blocks, part in classes(levels, mask):
                finer.append(([blocks, *reach], part))
        found = finer
    parts: Parts = []
    for reach, mask in found:
        mine: list[int] = []
        before = 0
        for tier, blocks in zip(tiers, reach, strict=True):
            while len(mine) < tier - 1:
                mine.append(0)  # a tier that no worker has
            mine.append(blocks - before)
            before = blocks
        parts.append((tuple(mine), mask))
    return parts


def _with_tiers(ahead: Levels, device: Levels, parts: Parts, tiers: int) -> PrefixLevels:
    """What is known by tiers, with predictions of device memory that go beyond it."""
    lifted: Parts = []
    predicted = False
    for mine, mask in parts:
        for blocks, slots in ahead:
            hit = slots & mask
            if hit and blocks > mine[0]:
                lifted.append((_lifted(mine, blocks), hit))
                predicted = True
            elif hit:
                lifted.append((mine, hit))
            mask ^= hit
        if mask:
            lifted.append((mine, mask))
    known = 0
    for _, mask in parts:
        known |= mask
    for blocks, slots in ahead:
        more = slots ^ slots & known
        if more:
            lifted.append(((blocks, *[0] * (tiers - 1)), more))
            predicted = True
    totals: dict[int, int] = {}
    for mine, mask in lifted:
        blocks = sum(mine)
        totals[blocks] = totals.get(blocks, 0) | mask
    levels = [(blocks, totals[blocks]) for blocks in sorted(totals, reverse=True)]
    return PrefixLevels(levels, device if predicted else None, lifted, tiers)


def _lifted(mine: tuple[int, ...], blocks: int) -> tuple[int, ...]:
    """One worker's figures by tier, if its device had so many ``blocks``: those below have less to add."""
    more = blocks - mine[0]
    out = [blocks]
    for tier in mine[1:]:
        less = min(more, tier)
        out.append(tier - less)
        more -= less
    return tuple(out)


def _blocks_of(level: tuple[int, int]) -> int:
    return level[0]


def _have(levels: Levels, blocks: int, slots: int) -> None:
    """``slots`` have so many blocks, no more than those before them."""
    if levels and levels[-1][0] == blocks:
        levels[-1] = (blocks, levels[-1][1] | slots)
    elif blocks:
        levels.append((blocks, slots))
