"""An index that caches of the same process feed with runs, without events and a wire in between.

A simulation has the changes of thousands of caches, and both ends in one process. Turning runs of blocks into hashes, batches,
bytes, events and keys would be most of its work. So a ``RunFeed`` replaces the batcher and passes runs on, and ``ChainIndex``
keeps them as runs. Places, catalog, scorer, roster and dedup filter are those of every index.

Its answers must be equal: ``tests/index/test_runs.py`` compares rows and scores with those of batcher, wire, follower, feed and
``MemoryIndex``, over random streams and over traces.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import TypeAlias

from kvyard.blocks.spec import GroupSpec
from kvyard.events.types import Tier
from kvyard.hashing import Chain, Run, TraceChain
from kvyard.index.catalog import Catalog
from kvyard.index.chains import ChainIndex
from kvyard.index.dedup import DedupFilter
from kvyard.index.identity import Identity
from kvyard.index.places import Holder, Place, Places
from kvyard.index.roster import Roster
from kvyard.index.scorer import HolderTrust, Scorer

_TRUSTED = HolderTrust()
_GOLDEN = 0.6180339887
"""Multiples of it spread evenly over the unit, however many there are."""


class _OpenChanges:
    """Changes of one place that were read and aren't in the index yet, since the next change may extend them.

    There is at most one removal and one store, and they have no block in common: their order makes no difference.
    """

    __slots__ = ("place", "removed", "removed_start", "removed_stop", "stored", "stored_start", "stored_stop")

    def __init__(self, place: int) -> None:
        self.place = place
        self.removed: Chain | None = None
        self.removed_start = 0
        self.removed_stop = 0
        self.stored: Chain | None = None
        self.stored_start = 0
        self.stored_stop = 0


Change: TypeAlias = tuple[bool, _OpenChanges, Chain | None, int, int]
"""Stored or removed, the place, and which blocks of which chain; without a chain the place was cleared."""


class RunFeed:
    """Announcements of one holder's caches, in flight to the index. It stands where a batcher stands (``EventBatcher``).

    Changes of a pass become visible when it ends, or with the next exchange, in order, and a configured lag later. Generated
    blocks of a trace are left out: no prompt can ask for them, since no other text has their names.
    """

    __slots__ = (
        "_block_size",
        "_dedup",
        "_due",
        "_every",
        "_index",
        "_lag",
        "_number",
        "_pending",
        "_phase",
        "_places",
        "_queue",
    )

    def __init__(
        self,
        index: ChainIndex,
        dedup: DedupFilter,
        places: Mapping[tuple[int, Tier], int],
        block_size: int,
        lag: int,
        due: list[tuple[int, int]],
        number: int,
        every: int = 0,
    ) -> None:
        """``places`` numbers the (group, tier)s that count; ``block_size`` is the index's. ``due`` is a heap into which
        this feed, as ``number``, enters its next time to flush. With ``every`` changes are exchanged at that interval in
        nanoseconds.
        """
        self._index = index
        self._dedup = dedup
        self._places = {where: _OpenChanges(place) for where, place in places.items()}
        self._block_size = block_size
        self._lag = lag
        self._every = every
        self._phase = int(every * ((number + 0.5) * _GOLDEN % 1.0))
        """Each feed exchanges at times of its own, so that requests which come in ticks don't meet all of them."""
        self._pending: list[Change] = []
        self._queue: deque[tuple[int, list[Change]]] = deque()
        self._due = due
        self._number = number

    @property
    def pending(self) -> bool:
        """Return true if something changed since the last pass ended."""
        return bool(self._pending)

    # -- the sink ---------------------------------------------------------------------------------------------------

    def entered(self, run: Run, group: int, tier: Tier, first: bool) -> None:
        if first:
            self._note(True, run, group, tier)

    def left(self, run: Run, group: int, tier: Tier, last: bool, reason: str | None = None) -> None:
        if last:
            self._note(False, run, group, tier)

    def cleared(self, tier: Tier | None = None) -> None:
        for (_, of), place in self._places.items():
            if tier is None or of == tier:
                self._pending.append((False, place, None, 0, 0))

    def _note(self, stored: bool, run: Run, group: int, tier: Tier) -> None:
        place = self._places.get((group, tier))
        if place is None:
            return
        chain, start, stop = run.chain, run.start, run.stop
        size = self._block_size
        if chain.block_size != size:
            # A group of larger blocks: the same text in the index's own.
            factor = chain.block_size // size
            chain, start, stop = chain.finer(size), start * factor, stop * factor
        if isinstance(chain, TraceChain):
            public = chain.trace.num_prompt_tokens // size
            if stop > public:
                if start >= public:
                    return
                stop = public
        self._pending.append((stored, place, chain, start, stop))

    # -- iterations -------------------------------------------------------------------------------------------------

    def end_iteration(self, now: int) -> None:
        """End a pass at ``now``: its changes are visible from then on, or from the next exchange on, plus the lag."""
        if self._pending:
            seen = now + self._lag
            if self._every:
                seen += (self._phase - now) % self._every
            heappush(self._due, (seen, self._number))
            self._queue.append((seen, self._pending))
            self._pending = []

    def flush(self, now: int) -> None:
        """Put everything that is visible by ``now`` into the index, what belongs together at once: an eviction goes on towards
        the start of a chain and a prompt towards its end, over many passes.
        """
        queue = self._queue
        if not queue or queue[0][0] > now:
            return
        while queue and queue[0][0] <= now:
            for stored, place, chain, start, stop in queue.popleft()[1]:
                if chain is None:
                    self._settle(place)
                    self._clear(place.place)
                elif stored:
                    gone, last = place.removed, place.stored
                    if gone is not None and _meet(gone, place.removed_start, place.removed_stop, chain, start, stop):
                        self._settle_removed(place)
                    if last is chain and place.stored_stop == start:
                        place.stored_stop = stop
                    else:
                        if last is not None:
                            self._settle_stored(place)
                        place.stored, place.stored_start, place.stored_stop = chain, start, stop
                else:
                    gone, last = place.removed, place.stored
                    if last is not None and _meet(last, place.stored_start, place.stored_stop, chain, start, stop):
                        self._settle_stored(place)
                    if gone is chain and place.removed_start == stop:
                        place.removed_start = start
                    else:
                        if gone is not None:
                            self._settle_removed(place)
                        place.removed, place.removed_start, place.removed_stop = chain, start, stop
        for place in self._places.values():
            self._settle(place)

    def close(self) -> None:
        """Remove the holder with all it held; announcements that still wait are dropped."""
        self._pending = []
        self._queue.clear()
        for place in self._places.values():
            self._clear(place.place)
        self._places = {}

    def _settle(self, place: _OpenChanges) -> None:
        """Nothing goes on where the last changes of ``place`` end: put them into the index."""
        if place.removed is not None:
            self._settle_removed(place)
        if place.stored is not None:
            self._settle_stored(place)

    def _settle_stored(self, place: _OpenChanges) -> None:
        chain, place.stored = place.stored, None
        assert chain is not None
        for low, high in self._index.store_run(place.place, chain, place.stored_start, place.stored_stop):
            self._dedup.repeated(place.place, chain.hashes(low, high))

    def _settle_removed(self, place: _OpenChanges) -> None:
        chain, place.removed = place.removed, None
        assert chain is not None
        for low, high in self._dedup.removed_spans(place.place, chain, place.removed_start, place.removed_stop):
            self._index.remove_run(place.place, chain, low, high)

    def _clear(self, place: int) -> None:
        self._index.clear(place)
        self._dedup.clear(place)


def _meet(chain: Chain, start: int, stop: int, other: Chain, low: int, high: int) -> bool:
    """Return true if blocks ``start`` to ``stop`` of ``chain`` and ``low`` to ``high`` of ``other`` overlap. They do if the
    first candidate is equal: a hash names its whole prefix.
    """
    first = start if start > low else low
    return first < stop and first < high and chain.keys[first] == other.keys[first]


class RunIndexer:
    """One index over any number of holders in this process. Nothing gets lost on this way, so all of it is trusted.

    A router asks it as it asks an ``Indexer``: ``identity``, ``roster``, ``reaches``.
    """

    def __init__(self, block_size: int, *, lag: int = 0, every: int = 0, backend: ChainIndex | None = None) -> None:
        """``lag``: nanoseconds until a change can be seen. ``every``: changes are exchanged so often, 0 for at once."""
        self.identity = Identity(block_size, direct=True)
        self.backend = ChainIndex() if backend is None else backend
        self.dedup = DedupFilter()
        self.places = Places()
        self.catalog = Catalog()
        self.scorer = Scorer(self.places, self.catalog, self.backend, block_size)
        self._lag = lag
        self._every = every
        self._feeds: dict[Holder, RunFeed] = {}
        self._narrow: dict[tuple[Tier, ...], Scorer] = {}
        """Scorers for which only some tiers exist."""
        self._due: list[tuple[int, int]] = []
        """Heap of (time, feed number): the next flush of each feed."""
        self._numbers: dict[Holder, int] = {}
        self._numbered: dict[int, RunFeed] = {}
        self._attached = 0

    def attach(self, holder: Holder, groups: Sequence[GroupSpec], tiers: Iterable[Tier]) -> RunFeed:
        """Return the feed for ``holder``'s caches on ``tiers``; give it to them as their sink."""
        self.catalog.configure(holder, groups)
        places = {
            (group, tier): self.places.number(Place(holder, tier, group))
            for tier in tiers
            for group in range(len(groups))
        }
        number = self._numbers[holder] = self._attached
        self._attached += 1
        feed = self._feeds[holder] = self._numbered[number] = RunFeed(
            self.backend, self.dedup, places, self.identity.block_size, self._lag, self._due, number, self._every
        )
        for scorer in (self.scorer, *self._narrow.values()):
            scorer.join(holder, _TRUSTED)
        return feed

    def detach(self, holder: Holder) -> None:
        """``holder`` is gone, and all it held with it."""
        self._feeds.pop(holder).close()
        del self._numbered[self._numbers.pop(holder)]
        self.catalog.forget(holder)
        self.places.retire(holder)
        for scorer in (self.scorer, *self._narrow.values()):
            scorer.leave(holder)

    def share(self, pool: str, members: Iterable[Holder]) -> None:
        """Credit what ``pool`` holds to each of ``members``."""
        self.places.share(pool, members)

    def flush(self, now: int) -> None:
        """Let answers see everything that is visible by ``now``. Costs by what is, not by how many holders there are."""
        due = self._due
        ready: set[int] = set()
        while due and due[0][0] <= now:
            ready.add(heappop(due)[1])
        for number in sorted(ready):
            feed = self._numbered.get(number)  # ``None`` where its holder is gone
            if feed is not None:
                feed.flush(now)

    def roster(self, workers: Sequence[Holder], tiers: tuple[Tier, ...] | None = None) -> Roster:
        """Return workers in an order of the caller's, to ask ``reaches`` about; of all tiers, or of ``tiers`` alone."""
        if tiers is None:
            return Roster(self.scorer, workers)
        scorer = self._narrow.get(tiers)
        if scorer is None:
            weights = dict.fromkeys(tiers, 1.0)
            scorer = Scorer(self.places, self.catalog, self.backend, self.identity.block_size, weights)
            scorer.trust(self.scorer.standings, 0)
            self._narrow[tiers] = scorer
        return Roster(scorer, workers)

    def reaches(self, roster: Roster, keys: Sequence[int], tokens: int | None = None) -> list[list[tuple[int, int]]]:
        """Return per tier how many blocks of a prompt the workers of ``roster`` could use; see ``Roster.reaches``."""
        return roster.reaches(keys, tokens)

    def computed(self, worker: Holder, tokens: int, last: Callable[[int], Sequence[int]]) -> None:
        """A worker has computed a prompt. Events of a replay announce all changes, so that nothing is to be done."""

    def check_integrity(self) -> None:
        """Raise ``AssertionError``, saying what is wrong, unless all parts agree with themselves."""
        self.backend.check_integrity()
        self.dedup.check_integrity()
