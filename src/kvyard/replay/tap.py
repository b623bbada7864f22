"""A tap: what one worker's caches announce, on its way to the router's index, without a wire in between.

It stands where a batcher stands, and keeps to the same rules: changes of a pass become visible when it ends, in order, and a
configured lag later. What no prompt can ever ask for is left out: blocks of generated text in a trace have names that nobody
else has.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping
from typing import TypeAlias

from kvyard.events.types import Tier
from kvyard.hashing import Chain, Key, Run, TraceChain
from kvyard.index.chains import ChainIndex

Op: TypeAlias = tuple[bool, int, Chain, int, int]
"""Stored or removed, the place, and which blocks of which chain."""


class Tap:
    """A ``Sink`` that feeds an index of chains. ``places`` numbers the (group, tier)s that count."""

    __slots__ = ("_block_size", "_chunked", "_counts", "_index", "_lag", "_pending", "_places", "_queue")

    def __init__(
        self,
        index: ChainIndex,
        places: Mapping[tuple[int, Tier], int],
        block_size: int,
        lag: int = 0,
        chunked: Collection[Tier] = (),
    ) -> None:
        """``block_size`` is the index's. Tiers that are ``chunked`` announce a block once for every chunk that has it, so
        that what they say must be counted (llm-d #680).
        """
        self._index = index
        self._places = dict(places)
        self._block_size = block_size
        self._lag = lag
        self._chunked = {place for (_, tier), place in places.items() if tier in chunked}
        self._counts: Counter[tuple[int, Key]] = Counter()
        self._pending: list[Op] = []
        self._queue: deque[tuple[int, list[Op]]] = deque()

    # -- the sink ---------------------------------------------------------------------------------------------------

    def entered(self, run: Run, group: int, tier: Tier, first: bool) -> None:
        """Copies of ``run`` came in; the first of their kind are told."""
        if first:
            self._note(True, run, group, tier)

    def left(self, run: Run, group: int, tier: Tier, last: bool, reason: str | None = None) -> None:
        """Copies of ``run`` went; the last of their kind are told."""
        if last:
            self._note(False, run, group, tier)

    def cleared(self, tier: Tier | None = None) -> None:
        """A whole tier, or all, was emptied."""
        for (_, of), place in self._places.items():
            if tier is None or of == tier:
                self._index.clear(place)
                for key in [key for key in self._counts if key[0] == place]:
                    del self._counts[key]

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
        """A pass is over at ``now``: what it changed can be seen from then on, plus the lag."""
        if self._pending:
            self._queue.append((now + self._lag, self._pending))
            self._pending = []

    def close(self) -> None:
        """The worker is gone, and all it held with it; nothing of it is told any more."""
        self.cleared()
        self._places = {}
        self._pending = []
        self._queue.clear()

    def flush(self, now: int) -> None:
        """Put everything that is visible by ``now`` into the index."""
        queue = self._queue
        while queue and queue[0][0] <= now:
            last: Op | None = None
            for op in queue.popleft()[1]:
                if last is not None:
                    if not last[0] and not op[0] and op[4] == last[3] and op[2] is last[2] and op[1] == last[1]:
                        # An eviction goes on where the last one ended, towards the start.
                        last = (False, last[1], last[2], op[3], last[4])
                        continue
                    self._apply(*last)
                last = op
            if last is not None:
                self._apply(*last)

    def _apply(self, stored: bool, place: int, chain: Chain, start: int, stop: int) -> None:
        if place in self._chunked:
            for low, high in self._effective(stored, place, chain, start, stop):
                self._change(stored, place, chain, low, high)
        else:
            self._change(stored, place, chain, start, stop)

    def _change(self, stored: bool, place: int, chain: Chain, start: int, stop: int) -> None:
        if stored:
            self._index.store_run(place, chain, start, stop)
        else:
            self._index.remove_run(place, chain, start, stop)

    def _effective(self, stored: bool, place: int, chain: Chain, start: int, stop: int) -> list[tuple[int, int]]:
        """Where the first announcement came or the last one went, as intervals."""
        counts = self._counts
        found: list[tuple[int, int]] = []
        for at, key in enumerate(chain.hashes(start, stop), start):
            counts[place, key] += 1 if stored else -1
            left = counts[place, key]
            if left <= 0:
                del counts[place, key]
            if left == (1 if stored else 0):
                if found and found[-1][1] == at:
                    found[-1] = (found[-1][0], at + 1)
                else:
                    found.append((at, at + 1))
        return found
