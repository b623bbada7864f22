"""Workload-aware eviction (Wang et al., ATC 25, arXiv 2506.02634): how likely a block is used again, by its last use.

Reuse times differ between kinds of requests and, within one, are close to exponential. A category is what the client calls the
request together with its turn. For each, over a sliding window, it is counted which share of the blocks was used again, and
after how long on average. The priority of a block that was used ``t`` ago is the probability that it is used within
the time it can expect to stay, ``life``::

    share x (exp(-t / mean) - exp(-(t + life) / mean))

``life`` is how old blocks were, lately, when they were evicted. Within a category priority falls with age, so each is a line by
age, and the least of all heads is evicted.

Where no turn is given it is worked out: a request that found half of its tokens cached goes on from the last request that
used the last of them.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import exp
from typing import ClassVar, NamedTuple

from kvyard.blocks.eviction.learning import LearningOrder, history_of
from kvyard.blocks.eviction.lru import LruOrder
from kvyard.blocks.extent import Extent, UseHistory
from kvyard.blocks.use import Use
from kvyard.clock import SECOND
from kvyard.registry import Option, Options


class _Window(NamedTuple):
    """Contribution of one call to the window, in blocks and nanoseconds."""

    time: int
    used: Counter[str]
    """By category: blocks that were used,"""
    reused: Counter[str]
    """those of them that were used again,"""
    gaps: Counter[str]
    """and after how long, in all."""
    evicted: int
    ages: int
    """Sum of the ages of the evicted blocks."""


class WorkloadAwareOrder(LearningOrder):
    """Least likely to be used again first."""

    OPTIONS: ClassVar[Options] = {
        "window_s": Option(1800.0, "Seconds of the past that are looked at.", positive=True),
        "turns": Option(8, "Turn from which on all turns are one category.", positive=True),
    }
    reads_time = True

    def __init__(self, now: Callable[[], int], options: Mapping[str, float] | None = None) -> None:
        super().__init__(now, options)
        self._lines: dict[str, LruOrder] = {}
        self._window: deque[_Window] = deque()
        self._used: Counter[str] = Counter()
        self._reused: Counter[str] = Counter()
        self._gaps: Counter[str] = Counter()
        self._evicted = self._ages = 0
        self._back = self._front = 0
        self._new = self._nothing()

    def _nothing(self) -> _Window:
        return _Window(0, Counter(), Counter(), Counter(), 0, 0)

    # -- events -----------------------------------------------------------------------------------------------------

    def used(self, extents: Sequence[Extent], use: Use, block_size: int, states: bool = False) -> list[Extent]:
        if not use.turn:
            use.turn = self._turn(extents, use, block_size)
        bounds = super().used(extents, use, block_size, states)
        self._slide(use.time)
        return bounds

    def _turn(self, extents: Sequence[Extent], use: Use, block_size: int) -> int:
        blocks, last = 0, None
        for extent in extents:
            previous = extent.history.use if extent.history is not None else None
            if previous is not None:
                if previous.request == use.request:
                    return previous.turn
                blocks += len(extent.ids)
                last = previous
        return last.turn + 1 if last is not None and 2 * blocks * block_size >= use.tokens else 1

    def note(self, extent: Extent, history: UseHistory, use: Use, block_size: int, again: bool) -> Use:
        blocks, previous = len(extent.ids), history.use
        label = f"{use.facts.category}/{min(use.turn, int(self.options['turns']))}"
        if not again:
            self._new.used[label] += blocks
            if previous is not None:
                self._new.reused[history.label] += blocks
                self._new.gaps[history.label] += blocks * (use.time - previous.time)
        history.label = label
        return use

    def evicted(self, extent: Extent) -> None:
        blocks, use = len(extent.ids), history_of(extent).use
        if use is not None:
            new = self._new
            self._new = new._replace(evicted=new.evicted + blocks, ages=new.ages + blocks * (self.now() - use.time))

    def _slide(self, now: int) -> None:
        """Take what is new into the window, and what is too old out of it. Between two uses nothing changes, so that who goes
        next doesn't depend on how much goes at once.
        """
        seen = self._new._replace(time=now)
        self._new = self._nothing()
        self._window.append(seen)
        self._add(seen, 1)
        while self._window[0].time < now - int(self.options["window_s"] * SECOND):
            self._add(self._window.popleft(), -1)

    def _add(self, seen: _Window, sign: int) -> None:
        for total, part in ((self._used, seen.used), (self._reused, seen.reused), (self._gaps, seen.gaps)):
            for label, value in part.items():
                total[label] += sign * value
        self._evicted += sign * seen.evicted
        self._ages += sign * seen.ages

    # -- asked -------------------------------------------------------------------------------------------------------

    def push(self, extent: Extent) -> None:
        self._back += 1
        self._line_for(extent, self._back).push(extent)

    def push_front(self, extent: Extent) -> None:
        self._front -= 1
        self._line_for(extent, self._front).push_front(extent)

    def _line_for(self, extent: Extent, serial: int) -> LruOrder:
        history = history_of(extent)
        history.serial = serial
        return self._lines.setdefault(history.label, LruOrder())

    def remove(self, extent: Extent) -> None:
        label = history_of(extent).label
        line = self._lines[label]
        line.remove(extent)
        if line.empty():
            del self._lines[label]

    def insert_after(self, extent: Extent, front: Extent) -> None:
        self._lines[history_of(extent).label].insert_after(extent, front)

    def head(self) -> Extent:
        if not self._lines:
            raise IndexError("no extent is left to evict")
        return min((line.head() for line in self._lines.values()), key=self._rank())

    def __iter__(self) -> Iterator[Extent]:
        rank = self._rank()
        lines = [iter(line) for line in self._lines.values()]
        heads = [next(line) for line in lines]
        while heads:
            first = min(range(len(heads)), key=lambda index: rank(heads[index]))
            yield heads[first]
            following = next(lines[first], None)
            if following is None:
                del heads[first], lines[first]
            else:
                heads[first] = following

    def _rank(self) -> Callable[[Extent], tuple[float, int]]:
        now = self.now()
        life = self._ages / self._evicted if self._evicted else self.options["window_s"] * SECOND

        def rank(extent: Extent) -> tuple[float, int]:
            history = history_of(extent)
            label, use = history.label, history.use
            age = now - use.time if use is not None else now
            reused = self._reused[label]
            mean = max(1.0, self._gaps[label] / reused if reused else life)
            share = (reused + 1) / (self._used[label] + 2)
            return share * (exp(-age / mean) - exp(-(age + life) / mean)), history.serial

        return rank
