"""Router's view of caches: the prefix of a prompt that each worker has.

From the index, with predictions on top: a prefix that was sent to a worker is there soon, long before its events arrive.
Or, for engines that announce nothing, from memory alone. A prediction ends when the index knows as much, or when its time
is up.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from kvyard.events.types import Tier
from kvyard.index import Holder, Identity, Roster
from kvyard.router.matches import CachedPrefixes, Groups
from kvyard.router.memory import RoutedMemory
from kvyard.router.ranking import Levels
from kvyard.router.request import Prompt
from kvyard.router.tree import Path


class PrefixIndex(Protocol):
    """Interface of an index in the router's own process: ``kvyard.index.Indexer``, or ``RunIndexer`` in a replay."""

    @property
    def identity(self) -> Identity:
        """Return the naming of blocks, and their size."""

    def roster(self, workers: Sequence[Holder]) -> Roster:
        """Return workers by slot, to ask ``reaches`` about."""

    def reaches(self, roster: Roster, keys: Sequence[int], tokens: int | None = None) -> list[list[tuple[int, int]]]:
        """Return per tier how many blocks of a prompt the workers of ``roster`` could use; see ``Roster.reaches``."""

    def computed(self, worker: Holder, tokens: int, last: Callable[[int], Sequence[int]]) -> None:
        """A worker has computed a prompt of ``tokens`` tokens, of which ``last`` returns the keys of the last whole blocks,
        given their number.
        """


class Reach(NamedTuple):
    """One worker, as an index elsewhere sees it."""

    tiers: tuple[int, ...]
    """Blocks of the longest usable prefix from each of ``Tier`` and all closer ones; tiers that are left out add nothing."""
    confidence: float = 1.0


Known: TypeAlias = Mapping[Holder, Reach]
"""Answer of an index elsewhere for one prompt, by worker. Workers that it doesn't name have nothing."""


class OverlapView:
    """Cached prefixes of prompts, by slot."""

    def __init__(
        self,
        block_size: int,
        indexer: PrefixIndex | None,
        memory: RoutedMemory | None,
        alone: bool = False,
        *,
        plain: bool = False,
    ) -> None:
        """``memory`` is of what was routed. It adds predictions to what an index knows, or, ``alone``, is all there is.
        ``plain``: predictions count whole, whatever blocks the groups of a hybrid model would keep of a prompt.
        """
        self.memory = memory
        self._alone = alone
        self._plain = plain
        self._size = block_size
        self._indexer = indexer
        self._roster: Roster | None = None
        self._slots: dict[Holder, int] = {}
        self._path: Path = ([], 0)
        """The path in the memory of the prompt that was looked at last."""

    def changed(self, workers: Sequence[Holder]) -> None:
        """Take these as the workers from now on, by slot."""
        self._slots = {worker: slot for slot, worker in enumerate(workers)}
        if self._indexer is not None:
            self._roster = self._indexer.roster(workers)

    def gone(self, slot: int) -> None:
        """Remove the prefixes that this worker was sent."""
        if self.memory is not None:
            self.memory.tree.remove(slot)

    def look(self, request: Prompt, now: int, known: Known | None = None) -> CachedPrefixes | None:
        """Return the cached prefixes of a prompt; ``None`` if no worker has any. ``known`` replaces the index. Cost goes by
        branches, not by workers.
        """
        memory, roster = self.memory, self._roster
        if memory is not None:
            memory.expire(now)
            self._path = memory.tree.find(request.keys)
            if self._alone:
                return CachedPrefixes(_of_device(self._sent(memory, request, ()))) if self._path[0] else None
        prefixes: CachedPrefixes | None = None
        device: Levels = []
        steps: Sequence[tuple[int, int]] = ()
        if known is not None:
            if known:
                prefixes = self._known_elsewhere(known)
                device = _levels([(tiers[0], slots) for tiers, slots in prefixes.groups])
        elif self._indexer is not None and roster is not None:
            reaches = self._indexer.reaches(roster, request.keys, request.num_tokens)
            steps = roster.steps
            if reaches:
                device = reaches[0] if roster.tiers[0] == Tier.G1 else []
                if len(reaches) == 1 and roster.tiers[0] == Tier.G1:
                    prefixes = CachedPrefixes(_of_device(device), 1, None, roster.trust)
                else:
                    groups = _by_tier(roster.tiers, reaches)
                    prefixes = CachedPrefixes(groups, int(roster.tiers[-1]), None, roster.trust)
        if memory is None or not self._path[0]:
            return prefixes
        sent = self._sent(memory, request, () if self._plain else steps)
        if prefixes is not None:
            memory.confirm(self._path, device)
        return _with_sent(prefixes, device, sent)

    def sent(self, slot: int, keys: Sequence[int], now: int) -> int:
        """Note that the prompt looked at last went to ``slot``. Returns a number by which it can be taken back, or 0."""
        return 0 if self.memory is None else self.memory.remember(slot, keys, self._path, now)

    def booked_elsewhere(self, slot: int, keys: Sequence[int], now: int) -> int:
        """Note that another router sent a prompt to ``slot``. Returns as ``sent`` does."""
        memory = self.memory
        if memory is None:
            return 0
        memory.expire(now)
        return memory.remember(slot, keys, memory.tree.find(keys), now)

    def withdraw(self, number: int) -> None:
        """Remove a prompt that its worker never computed."""
        if self.memory is not None and number:
            self.memory.withdraw(number)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _sent(self, memory: RoutedMemory, request: Prompt, steps: Sequence[tuple[int, int]]) -> Levels:
        """Return the usable part of what workers were sent; ``steps`` are the roster's."""
        size, most = self._size, max(0, request.num_tokens - 1)  # engines always compute the last token
        out: Levels = []
        for depth, slots in memory.tree.levels(self._path):
            for step, members in steps:
                coarse = slots & members
                # What a hybrid model could use of it depends on the blocks that its groups keep: only events announce those.
                if coarse and step:
                    out.append((min(depth * size, most) // step * step // size, coarse))
                slots ^= coarse
            if slots:
                out.append((min(depth, most // size), slots))
        return out

    def _known_elsewhere(self, known: Known) -> CachedPrefixes:
        depth = 1
        by_tiers: dict[tuple[int, ...], int] = {}
        by_trust: dict[float, int] = {}
        for worker, reach in known.items():
            slot = self._slots.get(worker)
            if slot is None:
                continue
            depth = max(depth, len(reach.tiers))
            tiers = tuple([blocks - before for blocks, before in zip(reach.tiers, (0, *reach.tiers))])
            by_tiers[tiers] = by_tiers.get(tiers, 0) | 1 << slot
            if reach.confidence < 1:
                by_trust[reach.confidence] = by_trust.get(reach.confidence, 0) | 1 << slot
        groups = [((*tiers, *[0] * (depth - len(tiers))), slots) for tiers, slots in by_tiers.items()]
        return CachedPrefixes(groups, depth, None, list(by_trust.items()))


def _of_device(levels: Levels) -> Groups:
    return [((blocks,), slots) for blocks, slots in levels]


def _levels(levels: Levels) -> Levels:
    """Return blocks with slots, most first."""
    return sorted([level for level in levels if level[0]], reverse=True)


def _by_tier(tiers: Sequence[Tier], reaches: Sequence[Levels]) -> Groups:
    """Return the addition of each tier from its reach with all closer ones: workers grouped by all of their figures."""
    # A tier reaches at least as far as those before it, so the last one has everyone that has anything.
    parts: list[tuple[list[int], int]] = [([blocks], slots) for blocks, slots in reaches[-1]]
    for levels in reversed(reaches[:-1]):
        finer: list[tuple[list[int], int]] = []
        for reach, slots in parts:
            for blocks, members in levels:
                part = slots & members
                if part:
                    finer.append(([blocks, *reach], part))
                    slots ^= part
            if slots:
                finer.append(([0, *reach], slots))
        parts = finer
    groups: Groups = []
    for reach, slots in parts:
        mine: list[int] = []
        before = 0
        for tier, blocks in zip(tiers, reach, strict=True):
            while len(mine) < tier - 1:
                mine.append(0)  # a tier that no worker has
            mine.append(blocks - before)
            before = blocks
        groups.append((tuple(mine), slots))
    return groups


def _with_sent(announced: CachedPrefixes | None, device: Levels, sent: Levels) -> CachedPrefixes | None:
    """Return the known prefixes extended by those sent since; ``device`` is the known part in device memory."""
    groups: Groups = []
    predicted = False
    known = 0
    if announced is not None:
        for tiers, slots in announced.groups:
            known |= slots
            for blocks, members in sent:
                more = slots & members
                if more and blocks > tiers[0]:
                    groups.append((_lifted(tiers, blocks), more))
                    predicted = True
                    slots ^= more
            if slots:
                groups.append((tiers, slots))
    below = (0,) * (announced.tiers - 1) if announced is not None else ()
    for blocks, slots in sent:
        more = slots ^ slots & known
        if more and blocks:
            groups.append(((blocks, *below), more))
            predicted = True
    if not predicted:
        return announced
    return CachedPrefixes(groups, 1 + len(below), device, announced.trust if announced is not None else ())


def _lifted(tiers: tuple[int, ...], blocks: int) -> tuple[int, ...]:
    """Return one worker's blocks by tier, if its device had ``blocks``: tiers below have less to add."""
    more = blocks - tiers[0]
    out = [blocks]
    for tier in tiers[1:]:
        less = min(more, tier)
        out.append(tier - less)
        more -= less
    return tuple(out)
