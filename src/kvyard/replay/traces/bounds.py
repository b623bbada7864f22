"""Reuse of a sequence of prompts in an ideal cache: with endless room, with LRU, and at best (Belady). It knows no clock.

The model: prompts are looked up one after the other; a hit is the longest prefix that is resident; then the prompt's blocks
are touched front to back, and LRU evicts what was touched longest ago. Belady's bound may keep any blocks at all that fit,
and knows the future.

It works on runs rather than blocks. Ids are cumulative, so prompts that share a block share all before it. Of what a prompt
touched, the part that wasn't touched since is therefore always its tail, and a new prompt takes over whole runs: the front
from the latest prompt that shares anything with it, the next from an older one that shares more, and so on. All blocks of a
run were last used by the same prompt and are used next by the same prompt.
"""

import heapq
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvyard.errors import KvyardError
from kvyard.replay.traces.prefixes import PromptPrefixes

CHECKED = 4096
"""Prompts whose ids are looked at before they are taken to be cumulative: wrong ones give themselves away long before."""

MOST = (1 << 63) - 1
Numbers = Sequence[int]


class Hits(NamedTuple):
    """Hits, and the total."""

    blocks: int
    all_blocks: int
    tokens: int
    all_tokens: int

    @property
    def share(self) -> float:
        """Blocks hit of all blocks."""
        return self.blocks / self.all_blocks if self.all_blocks else 0.0

    @property
    def token_share(self) -> float:
        """Prompt tokens in blocks hit, of all prompt tokens. A last block that is partial counts what it has."""
        return self.tokens / self.all_tokens if self.all_tokens else 0.0


class Accesses:
    """Prompts in the order of their look-ups, reduced to the runs that they shared with earlier ones."""

    def __init__(self) -> None:
        self.prompts = 0
        self.blocks = 0
        self.tokens = 0
        self.unique = 0
        """Different blocks."""
        # One entry per run, in order of the prompts that used it again.
        self.prompt = array("q")
        """Prompt that used it again."""
        self.before = array("q")
        """Prompt that used it last before that."""
        self.length = array("q")
        """In blocks."""
        self.length_tokens = array("q")
        self.distance = array("q")
        """Different blocks touched since its first block was: a larger LRU cache hits it."""
        self._index = PromptPrefixes()
        self._seen: set[int] = set()
        self._live = _Sums()

    def add(self, ids: Sequence[int], tokens: int | None = None, block_size: int = 1) -> int:
        """Look a prompt up and touch it. Returns how many of its blocks had been seen before.

        ``tokens`` is its length, if not a multiple of ``block_size``. Raises ``KvyardError`` where an id has been seen behind
        another prefix, as far as that shows.
        """
        if tokens is None:
            tokens = len(ids) * block_size
        me = self.prompts
        live = self._live
        runs, start = self._index.touch(ids, me, me < CHECKED)
        stop = len(ids)
        if me < CHECKED:
            self._check(ids[start:])
        for owner, begin, end in runs:
            self.prompt.append(me)
            self.before.append(owner)
            self.length.append(end - begin)
            self.length_tokens.append(min(end * block_size, tokens) - begin * block_size)
            self.distance.append(live.total - live.before(owner) - 1)
        for owner, begin, end in runs:
            live.add(owner, begin - end)
        live.append(stop)
        self.prompts += 1
        self.blocks += stop
        self.tokens += tokens
        self.unique += stop - start
        return start

    def _check(self, new: Sequence[int]) -> None:
        if not self._seen.isdisjoint(new):
            again = next(id_ for id_ in new if id_ in self._seen)
            raise KvyardError(
                f"id {again} follows two different blocks, or none; ids must name all that comes before them, or be "
                "chained (--chain-ids)"
            )
        self._seen.update(new)
        if self.prompts == CHECKED - 1:
            self._seen.clear()


def infinite(accesses: Accesses) -> Hits:
    """Return the hits of a cache with room for everything."""
    return Hits(sum(accesses.length), accesses.blocks, sum(accesses.length_tokens), accesses.tokens)


def lru(accesses: Accesses, capacities: Iterable[int]) -> list[Hits]:
    """Return the hits of LRU with each capacity, in blocks."""
    import numpy

    distances, lengths, tokens = (
        numpy.array(column, dtype=numpy.int64)
        for column in (accesses.distance, accesses.length, accesses.length_tokens)
    )
    order = numpy.argsort(distances)
    distances = distances[order]
    sums = [numpy.concatenate(([0], numpy.cumsum(column[order]))) for column in (lengths, tokens)]
    hits = []
    for capacity in _checked(capacities):
        reach = int(numpy.searchsorted(distances, min(capacity, MOST), side="left"))
        hits.append(Hits(int(sums[0][reach]), accesses.blocks, int(sums[1][reach]), accesses.tokens))
    return hits


def belady(accesses: Accesses, capacities: Iterable[int]) -> list[int]:
    """Return the most blocks that any cache of each capacity could hit, however it chooses what to keep.

    A run that is kept from one use to the next takes room between them. Whenever there is too little, the run that is used
    again last of all goes, which no other choice beats.
    """
    import numpy

    ends, lengths = accesses.prompt, accesses.length
    # Runs in order of their first use; of their last they are in order already.
    before = numpy.array(accesses.before, dtype=numpy.int64)
    order = numpy.argsort(before, kind="stable")
    begins, firsts = array("q", order.astype(numpy.int64).tobytes()), array("q", before[order].tobytes())
    everything, most = sum(lengths), _most_held(ends, lengths, begins, firsts)
    return [
        everything if capacity >= most else _belady(ends, lengths, begins, firsts, capacity)
        for capacity in _checked(capacities)
    ]


def _most_held(ends: Numbers, lengths: Numbers, begins: Numbers, firsts: Numbers) -> int:
    """Return the blocks that a cache holds at once at most which keeps everything that is used again."""
    held = most = due = 0
    for begin, i in zip(firsts, begins, strict=True):
        while ends[due] <= begin:
            held -= lengths[due]
            due += 1
        held += lengths[i]
        most = max(most, held)
    return most


def _belady(ends: Numbers, lengths: Numbers, begins: Numbers, firsts: Numbers, capacity: int) -> int:
    kept = array("q", bytes(8 * len(ends)))
    heap: list[int] = []
    """Numbers of runs, negated: the one with the largest is used again last of all."""
    push, pop = heapq.heappush, heapq.heappop
    room, hit, due = capacity, 0, 0
    for begin, i in zip(firsts, begins, strict=True):
        while ends[due] <= begin:
            had = kept[due]
            hit += had
            room += had
            due += 1
        kept[i] = length = lengths[i]
        room -= length
        push(heap, -i)
        while room < 0:
            last = -heap[0]
            had = kept[last]
            if had > -room:
                kept[last] = had + room
                room = 0
            else:
                kept[last] = 0
                room += had
                pop(heap)
    return hit + sum(kept[due:])


def _checked(capacities: Iterable[int]) -> list[int]:
    checked = list(capacities)
    for capacity in checked:
        if capacity < 0:
            raise KvyardError(f"a capacity is a number of blocks, not {capacity}")
    return checked


class _Sums:
    """A growing list of numbers with fast prefix sums (Fenwick's tree)."""

    __slots__ = ("_tree", "total")

    def __init__(self) -> None:
        self._tree = array("q", (0,))
        self.total = 0

    def append(self, value: int) -> None:
        tree = self._tree
        size = len(tree)
        self.total += value
        below, bottom = size - 1, size - (size & -size)
        while below > bottom:
            value += tree[below]
            below -= below & -below
        tree.append(value)

    def add(self, index: int, value: int) -> None:
        tree = self._tree
        self.total += value
        node = index + 1
        while node < len(tree):
            tree[node] += value
            node += node & -node

    def before(self, index: int) -> int:
        """Return the sum of all numbers before ``index``."""
        tree, total = self._tree, 0
        node = index
        while node:
            total += tree[node]
            node -= node & -node
        return total
