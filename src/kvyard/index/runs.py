"""Runs in: an index that caches of the same process feed directly, without events and a wire in between.

A simulation has thousands of caches' worth of changes and both ends in one process. Turning each run of blocks into hashes, and
hashes into a batch, bytes, events and keys again, would be most of its work. So a ``RunFeed`` stands where a batcher stands and
hands runs on, and ``ChainIndex`` keeps them as runs. All that decides an answer is what every index has: places, catalog,
scorer, roster, and the dedup filter.

What it must not do is answer differently. ``tests/index/test_runs.py`` holds it against batcher, wire, follower, feed and
``MemoryIndex``: the same rows and scores, over random streams and over traces.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
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
from kvyard.index.scorer import Scorer, Standing

_TRUSTED = Standing()
_GOLDEN = 0.6180339887
"""Multiples of it spread evenly over the unit, however many there are."""
Change: TypeAlias = tuple[bool, int, Chain | None, int, int]
"""Stored or removed, the place, and which blocks of which chain; without a chain the place was cleared."""


class RunFeed:
    """What one holder's caches announce, on its way into the index. It stands where a batcher stands (``EventBatcher``).

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
        """``places`` numbers the (group, tier)s that count; ``block_size`` is the index's. ``due`` is a heap that is told when
        this feed, which has a ``number`` there, next has something to flush. Where changes are exchanged now and then, it is
        done ``every`` so many nanoseconds.
        """
        self._index = index
        self._dedup = dedup
        self._places = dict(places)
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
        """Whether something changed since the last pass was over."""
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
        """A pass is over at ``now``: what it changed can be seen from then on, or from the next exchange on, plus the lag."""
        if self._pending:
            seen = now + self._lag
            if self._every:
                seen += (self._phase - now) % self._every
            heappush(self._due, (seen, self._number))
            self._queue.append((seen, self._pending))
            self._pending = []

    def flush(self, now: int) -> None:
        """Put everything that is visible by ``now`` into the index."""
        queue = self._queue
        while queue and queue[0][0] <= now:
            last: Change | None = None
            for change in queue.popleft()[1]:
                if last is not None:
                    if _goes_on(last, change):
                        last = (False, last[1], last[2], change[3], last[4])
                        continue
                    self._apply(last)
                last = change
            if last is not None:
                self._apply(last)

    def close(self) -> None:
        """The holder is gone, and all it held with it; what still waits is never told."""
        self._pending = []
        self._queue.clear()
        for place in self._places.values():
            self._clear(place)
        self._places = {}

    def _apply(self, change: Change) -> None:
        stored, place, chain, start, stop = change
        if chain is None:
            self._clear(place)
        elif stored:
            for low, high in self._index.store_run(place, chain, start, stop):
                self._dedup.repeated(place, chain.hashes(low, high))
        else:
            for low, high in self._dedup.removed_spans(place, chain, start, stop):
                self._index.remove_run(place, chain, low, high)

    def _clear(self, place: int) -> None:
        self._index.clear(place)
        self._dedup.clear(place)


def _goes_on(last: Change, change: Change) -> bool:
    """Whether both are removals and the second goes on where the first ended, towards the start: so an eviction goes."""
    return (
        not last[0]
        and not change[0]
        and change[2] is last[2]
        and change[2] is not None
        and change[4] == last[3]
        and change[1] == last[1]
    )


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
        """When feeds have something to flush, by their numbers, as a heap."""
        self._numbers: dict[Holder, int] = {}
        self._numbered: dict[int, RunFeed] = {}
        self._attached = 0

    def attach(self, holder: Holder, groups: Sequence[GroupSpec], tiers: Iterable[Tier]) -> RunFeed:
        """The feed for ``holder``'s caches on ``tiers``; give it to them as their sink."""
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
        """Workers in an order of the caller's, to ask ``reaches`` about; of all tiers, or of ``tiers`` alone."""
        if tiers is None:
            return Roster(self.scorer, workers)
        scorer = self._narrow.get(tiers)
        if scorer is None:
            weights = dict.fromkeys(tiers, 1.0)
            scorer = Scorer(self.places, self.catalog, self.backend, self.identity.block_size, weights)
            scorer.trust(self.scorer.standings, 0)
            self._narrow[tiers] = scorer
        return Roster(scorer, workers)

    def reaches(self, roster: Roster, keys: Sequence[int], tokens: int | None = None) -> list[list[int]]:
        """Per tier and worker of ``roster`` how many blocks of a prompt it could use; see ``Roster.reaches``."""
        return roster.reaches(keys, tokens)

    def levels(
        self, roster: Roster, keys: Sequence[int], tokens: int | None = None
    ) -> list[list[tuple[int, int]]] | None:
        """The same by lengths, where the roster is flat; see ``Roster.levels``."""
        return roster.levels(keys, tokens)

    def is_flat(self, roster: Roster) -> bool:
        """Whether ``levels`` has an answer about ``roster`` now."""
        return roster.flat

    def check_integrity(self) -> None:
        """Raise ``AssertionError``, saying what is wrong, unless all parts agree with themselves."""
        self.backend.check_integrity()
        self.dedup.check_integrity()
