"""Segmented LRU (Karedla, Love and Wherry, 1994), as in SGLang's ``slru``: blocks used again are protected from the others.

SGLang protects whatever has been used twice, without limit (``protected=1``). In the original, and here by default, the
protected segment has 80 % of the cache; blocks beyond that lose their protection when something must be evicted.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

from kvyard.blocks.eviction.learning import LearningOrder, history_of
from kvyard.blocks.eviction.lru import LruOrder
from kvyard.blocks.extent import Extent
from kvyard.registry import Option, Options


class SlruOrder(LearningOrder):
    """Least recently used first, of those on probation before the protected."""

    OPTIONS: ClassVar[Options] = {
        "uses": Option(2, "Uses from which on a block is protected."),
        "protected": Option(0.8, "Share of all blocks that may be protected.", most=1),
    }

    def __init__(self, now: Callable[[], int], options: Mapping[str, float] | None = None) -> None:
        super().__init__(now, options)
        self._probation = LruOrder()
        self._protected = LruOrder()
        self._blocks = 0
        """Candidates that are protected."""

    def push(self, extent: Extent) -> None:
        self._line_for(extent).push(extent)

    def push_front(self, extent: Extent) -> None:
        self._line_for(extent).push_front(extent)

    def _line_for(self, extent: Extent) -> LruOrder:
        history = history_of(extent)
        history.score = 1.0 if history.uses >= self.options["uses"] else 0.0
        if not history.score:
            return self._probation
        self._blocks += len(extent.ids)
        return self._protected

    def remove(self, extent: Extent) -> None:
        if history_of(extent).score:
            self._blocks -= len(extent.ids)
            self._protected.remove(extent)
        else:
            self._probation.remove(extent)

    def insert_after(self, extent: Extent, front: Extent) -> None:
        (self._protected if history_of(extent).score else self._probation).insert_after(extent, front)

    def head(self) -> Extent:
        self._demote()
        return (self._protected if self._probation.empty() else self._probation).head()

    def _demote(self) -> None:
        """Move the surplus of the protected segment behind those on probation, the least recently used first."""
        most = int(self.options["protected"] * self.capacity)
        while self._blocks > most:
            extent = self._protected.head()
            keep = len(extent.ids) - (self._blocks - most)
            if keep > 0:
                self.cut(extent, (extent.start + keep,))  # the later part keeps the object, and goes
            self.remove(extent)
            history_of(extent).score = 0.0
            self._probation.push(extent)

    def __iter__(self) -> Iterator[Extent]:
        # What is demoted comes from the head of the protected, so it makes no difference here.
        yield from self._probation
        yield from self._protected
