"""Queue-informed LRU, as proposed for vLLM in vllm-project/vllm #48485: what waiting requests will find is evicted last.

Nothing is pinned or kept back: it only changes who is next. Among what is protected, that of the request furthest from its turn
goes first. Which requests wait is looked at when a pass is formed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from kvyard.blocks.eviction.learning import standing_of
from kvyard.blocks.eviction.ranked import RankedOrder
from kvyard.blocks.extent import Extent, Standing


class QueueInformedOrder(RankedOrder):
    """Least recently used first; after all others, what the first waiting requests would hit."""

    OPTIONS: ClassVar[Mapping[str, float]] = {"requests": 256}
    """How many waiting requests are looked at: vLLM's proposal takes as many as may run."""
    reads_queue = True

    def __init__(self, now: Callable[[], int], options: Mapping[str, float] | None = None) -> None:
        super().__init__(now, options)
        self._protected: list[Extent] = []
        """Candidates that are protected."""

        self._look = 0.0
        """Counts how often the queue was looked at: what was protected before isn't any more."""

    def protect(self, waiting: Sequence[Sequence[Extent]]) -> None:
        before, self._protected = self._protected, []
        self._look += 1
        wanted: dict[Extent, int] = {}
        for turn, extents in enumerate(waiting[: int(self.options["requests"])], 1):
            for extent in extents:
                wanted.setdefault(extent, turn)
        for extent in before:
            if extent not in wanted:
                self._rank(extent, 0.0)
        for extent, turn in wanted.items():
            self._rank(extent, 1.0 / turn)

    def _rank(self, extent: Extent, score: float) -> None:
        """Give ``extent``, a candidate or not, another score; its age stays what it is."""
        standing = standing_of(extent)
        standing.worth = self._look
        changed = standing.score != score
        standing.score = score
        if standing.ticket and changed:
            self._heap.drop(standing)
            self._heap.add(extent, standing)
        if standing.ticket and score:
            self._protected.append(extent)

    def score(self, extent: Extent, standing: Standing) -> float:
        if standing.worth != self._look:
            return 0.0
        if standing.score:
            self._protected.append(extent)
        return standing.score

    def insert_after(self, extent: Extent, front: Extent) -> None:
        super().insert_after(extent, front)
        if standing_of(front).score:
            self._protected.append(front)
