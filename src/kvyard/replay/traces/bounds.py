"""What a cache could have kept of a sequence of prompts: with endless room, with LRU, and at best (Belady). It knows no clock.

The model: prompts are looked up one after the other; a hit is the longest prefix that is resident; then the prompt's blocks are
touched front to back, and LRU evicts what was touched longest ago. Belady's bound may keep any blocks at all, so long as they
fit, and knows the future.

It works on stretches rather than blocks. Ids are cumulative, so prompts that share a block share all before it. Of what a
prompt touched, the part that wasn't touched since is therefore always its tail, and a new prompt takes over whole stretches:
the front from the latest prompt that shares anything with it, the next from an older one that shares more, and so on. All
blocks of a stretch were last used by the same prompt and are used next by the same prompt.
"""

import heapq
from array import array
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

from kvyard.errors import KvyardError


class Hits(NamedTuple):
    """How much was hit, of how much."""

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
    """Prompts in the order of their look-ups, reduced to the stretches that they shared with earlier ones."""

    def __init__(self) -> None:
        self.prompts = 0
        self.blocks = 0
        self.tokens = 0
        self.unique = 0
        """Different blocks."""
        # One entry per stretch, in order of the prompts that used it again.
        self.prompt = array("q")
        """Who used it again."""
        self.before = array("q")
        """Who used it last before that."""
        self.length = array("q")
        """In blocks."""
        self.length_tokens = array("q")
        self.distance = array("q")
        """Different blocks touched since its first block was: a larger LRU cache hits it."""
        self._latest: dict[Hashable, int] = {}
        self._tails: list[int] = []
        """Where the part that wasn't touched since begins, by prompt."""
        self._live = _Sums()

    def add(self, ids: Sequence[Hashable], tokens: int | None = None, block_size: int = 1) -> int:
        """Look a prompt up and touch it. Returns how many of its blocks had been seen before.

        ``tokens`` is its length, if not a multiple of ``block_size``. Raises ``KvyardError`` where an id has been seen behind
        another prefix, as far as that shows.
        """
        if tokens is None:
            tokens = len(ids) * block_size
        me = self.prompts
        latest, tails, live = self._latest, self._tails, self._live
        stretches: list[tuple[int, int, int]] = []
        start, stop = 0, len(ids)
        while start < stop:
            owner = latest.get(ids[start])
            if owner is None:
                break
            if tails[owner] != start:
                raise KvyardError(
                    f"id {ids[start]} is block {start} of one prompt and block {tails[owner]} of another, or follows two "
                    "different blocks; ids must name all that comes before them, or be chained (--chain-ids)"
                )
            end = self._end(ids, owner, start, stop)
            stretches.append((owner, start, end))
            start = end
        for owner, begin, end in stretches:
            self.prompt.append(me)
            self.before.append(owner)
            self.length.append(end - begin)
            self.length_tokens.append(min(end * block_size, tokens) - begin * block_size)
            self.distance.append(live.total - live.before(owner) - 1)
        for owner, begin, end in stretches:
            tails[owner] = end
            live.add(owner, begin - end)
        latest.update(zip(ids, repeat(me)))
        tails.append(0)
        live.append(stop)
        self.prompts += 1
        self.blocks += stop
        self.tokens += tokens
        self.unique += stop - start
        return start

    def _end(self, ids: Sequence[Hashable], owner: int, start: int, stop: int) -> int:
        """Where the stretch ends that begins at ``start``: the first block whose latest user isn't ``owner``."""
        latest = self._latest
        return bisect_left(ids, True, start + 1, stop, key=lambda one: latest.get(one) != owner)


def infinite(accesses: Accesses) -> Hits:
    """What a cache with room for everything hits."""
    return Hits(sum(accesses.length), accesses.blocks, sum(accesses.length_tokens), accesses.tokens)


def lru(accesses: Accesses, capacities: Iterable[int]) -> list[Hits]:
    """What LRU hits with each capacity, in blocks."""
    order = sorted(range(len(accesses.distance)), key=accesses.distance.__getitem__)
    distances = [accesses.distance[i] for i in order]
    blocks, tokens = [0], [0]
    for i in order:
        blocks.append(blocks[-1] + accesses.length[i])
        tokens.append(tokens[-1] + accesses.length_tokens[i])
    found = []
    for capacity in _checked(capacities):
        reach = bisect_left(distances, capacity)
        found.append(Hits(blocks[reach], accesses.blocks, tokens[reach], accesses.tokens))
    return found


def belady(accesses: Accesses, capacities: Iterable[int]) -> list[int]:
    """The most blocks that any cache of each capacity could hit, however it chooses what to keep.

    A stretch that is kept from one use to the next takes room between them. Whenever there is too little, whatever is used
    again last of all goes, which no other choice beats.
    """
    ends, lengths = accesses.prompt, accesses.length
    by_start: list[list[int]] = [[] for _ in range(accesses.prompts)]
    for i, begin in enumerate(accesses.before):
        by_start[begin].append(i)
    return [_belady(ends, lengths, by_start, capacity) for capacity in _checked(capacities)]


def _belady(ends: Sequence[int], lengths: Sequence[int], by_start: list[list[int]], capacity: int) -> int:
    kept = [0] * len(ends)
    heap: list[tuple[int, int]] = []
    room, hit, due = capacity, 0, 0
    for prompt, beginning in enumerate(by_start):
        while due < len(ends) and ends[due] == prompt:
            hit += kept[due]
            room += kept[due]
            due += 1
        for i in beginning:
            kept[i] = lengths[i]
            room -= lengths[i]
            heapq.heappush(heap, (-ends[i], i))
        while room < 0:
            _, i = heap[0]
            given = min(kept[i], -room)
            kept[i] -= given
            room += given
            if not kept[i]:
                heapq.heappop(heap)
    return hit


def _checked(capacities: Iterable[int]) -> list[int]:
    found = list(capacities)
    for capacity in found:
        if capacity < 0:
            raise KvyardError(f"a capacity is a number of blocks, not {capacity}")
    return found


class _Sums:
    """A growing list of numbers with fast prefix sums (Fenwick's tree)."""

    __slots__ = ("_tree", "total")

    def __init__(self) -> None:
        self._tree = [0]
        self.total = 0

    def append(self, value: int) -> None:
        tree = self._tree
        at = len(tree)
        self.total += value
        below, bottom = at - 1, at - (at & -at)
        while below > bottom:
            value += tree[below]
            below -= below & -below
        tree.append(value)

    def add(self, index: int, value: int) -> None:
        tree = self._tree
        self.total += value
        at = index + 1
        while at < len(tree):
            tree[at] += value
            at += at & -at

    def before(self, index: int) -> int:
        """The sum of all numbers before ``index``."""
        tree, found = self._tree, 0
        at = index
        while at:
            found += tree[at]
            at -= at & -at
        return found
