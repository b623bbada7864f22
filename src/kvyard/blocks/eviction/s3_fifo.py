"""S3-FIFO (Yang et al., SOSP 23): a small queue for what is new, a main one for what was used again, a ghost that
remembers.

New blocks enter the small queue, a tenth of the cache. Once it is full, its oldest block goes to the main queue if it was
used at least twice more, else it is evicted and its name enters the ghost, which remembers as many names as the main queue
has blocks. What is computed again while the ghost remembers it enters the main queue. There the oldest block is evicted if
it wasn't used since it came up last, else it goes to the end with one use less.

A use moves nothing: a block that was hit returns to its place when it is released.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

from kvyard.blocks.eviction.learning import LearningOrder, history_of
from kvyard.blocks.eviction.ranked import RankHeap
from kvyard.blocks.extent import Extent, UseHistory
from kvyard.blocks.use import Use
from kvyard.hashing import Key
from kvyard.registry import Option, Options

MAIN = "main"
MOST_USES = 3
"""Uses that are counted, two bits of them."""


class S3FifoOrder(LearningOrder):
    """Oldest of the small queue first while that is full, else oldest of the main queue."""

    OPTIONS: ClassVar[Options] = {
        "small": Option(0.1, "Share of blocks of the small queue.", most=1),
        "promote": Option(2, "Uses after the first that take a block from the small queue to the main queue."),
    }
    foreseeable = False

    def __init__(self, now: Callable[[], int], options: Mapping[str, float] | None = None) -> None:
        super().__init__(now, options)
        self._small = RankHeap()
        self._main = RankHeap()
        self._in_small = 0
        """Candidates there, in blocks."""
        self._serial = 0
        self._ghost: dict[tuple[int, Key], None] = {}

    # -- events -----------------------------------------------------------------------------------------------------

    def bounds(self, extent: Extent, use: Use, block_size: int, states: bool) -> Sequence[int]:
        node = extent.node
        if extent.history is not None or node is None or not self._ghost:
            return ()
        known = [(node.group, node.keys[block]) in self._ghost for block in range(extent.start, extent.stop)]
        return [extent.start + block for block in range(1, len(known)) if known[block] != known[block - 1]]

    def note(self, extent: Extent, history: UseHistory, use: Use, block_size: int, again: bool) -> Use:
        node = extent.node
        if history.use is None:
            history.uses = 0  # coming in is no use
            if node is not None and (node.group, node.keys[extent.start]) in self._ghost:
                history.label = MAIN
                for block in range(extent.start, extent.stop):
                    self._ghost.pop((node.group, node.keys[block]), None)
        history.uses = min(history.uses, MOST_USES)
        return use

    def evicted(self, extent: Extent) -> None:
        node = extent.node
        if node is not None and history_of(extent).label != MAIN:
            ghost = self._ghost
            for block in range(extent.stop - 1, extent.start - 1, -1):
                name = (node.group, node.keys[block])
                ghost.pop(name, None)
                ghost[name] = None
            most = self.capacity - self._small_blocks
            while len(ghost) > most:
                del ghost[next(iter(ghost))]

    @property
    def _small_blocks(self) -> int:
        return max(1, int(self.options["small"] * self.capacity))

    # -- asked -------------------------------------------------------------------------------------------------------

    def push(self, extent: Extent) -> None:
        history = history_of(extent)
        if not history.serial:
            self._to_end(history)
        self._enter(extent, history)

    def push_front(self, extent: Extent) -> None:
        self._enter(extent, history_of(extent))  # it has its place

    def _enter(self, extent: Extent, history: UseHistory) -> None:
        if history.label == MAIN:
            self._main.add(extent, history)
        else:
            self._small.add(extent, history)
            self._in_small += len(extent.ids)

    def _to_end(self, history: UseHistory) -> None:
        self._serial += 1
        history.serial = self._serial

    def remove(self, extent: Extent) -> None:
        history = history_of(extent)
        if history.label == MAIN:
            self._main.drop(history)
        else:
            self._small.drop(history)
            self._in_small -= len(extent.ids)

    def insert_after(self, extent: Extent, front: Extent) -> None:
        (self._main if history_of(extent).label == MAIN else self._small).divide(extent, front)

    def head(self) -> Extent:
        full = self._small_blocks
        while True:
            main = self._main.first()
            small = self._small.first()
            if small is not None and (main is None or self._in_small >= full):
                history = history_of(small)
                stays = history.uses >= self.options["promote"]
                # No more of it than leaves the small queue one block short of full.
                over = len(small.ids) if main is None and not stays else max(1, self._in_small - full + 1)
                if over < len(small.ids):
                    self.cut(small, (small.stop - over,))  # the later part keeps the object
                if not stays:
                    return small
                self.remove(small)
                history.label, history.uses = MAIN, 0
                self._to_end(history)
                self._enter(small, history)
            elif main is not None:
                history = history_of(main)
                if not history.uses:
                    return main
                self.remove(main)
                history.uses -= 1
                self._to_end(history)
                self._enter(main, history)
            else:
                raise IndexError("no extent is left to evict")

    def __iter__(self) -> Iterator[Extent]:
        """By queue and age. Who goes next depends on how full the small queue is by then (``foreseeable``)."""
        yield from self._small
        yield from self._main
