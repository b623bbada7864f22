"""Queue-informed LRU, as proposed for vLLM in vllm-project/vllm #48485: blocks that waiting requests will hit are evicted last.

Nothing is pinned: only the order of eviction changes. Among protected blocks, those of the request furthest back in the queue
are evicted first. The queue is read when a pass is formed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from kvyard.blocks.eviction.learning import history_of
from kvyard.blocks.eviction.ranked import RankedOrder
from kvyard.blocks.extent import Extent, UseHistory
from kvyard.registry import Option, Options


class QueueInformedOrder(RankedOrder):
    """Least recently used first; after all others, what the first waiting requests would hit."""

    OPTIONS: ClassVar[Options] = {
        "requests": Option(256, "Waiting requests that are looked at; vLLM's proposal takes as many as may run."),
    }
    reads_queue = True

    def __init__(self, now: Callable[[], int], options: Mapping[str, float] | None = None) -> None:
        super().__init__(now, options)
        self._protected: list[Extent] = []
        """Candidates that are protected."""

        self.queue_depth = int(self.options["requests"])
        self._look = 0.0
        """Counts how often the queue was looked at: what was protected before isn't any more."""

    def protect(self, waiting: Sequence[Sequence[Extent]]) -> None:
        before, self._protected = self._protected, []
        self._look += 1
        wanted: dict[Extent, int] = {}
        for turn, extents in enumerate(waiting, 1):
            for extent in extents:
                wanted.setdefault(extent, turn)
        for extent in before:
            if extent not in wanted:
                self._rank(extent, 0.0)
        for extent, turn in wanted.items():
            self._rank(extent, 1.0 / turn)

    def _rank(self, extent: Extent, score: float) -> None:
        """Give ``extent``, a candidate or not, another score; its age stays what it is."""
        history = history_of(extent)
        history.worth = self._look
        changed = history.score != score
        history.score = score
        if history.ticket and changed:
            self._heap.drop(history)
            self._heap.add(extent, history)
        if history.ticket and score:
            self._protected.append(extent)

    def score(self, extent: Extent, history: UseHistory) -> float:
        if history.worth != self._look:
            return 0.0
        if history.score:
            self._protected.append(extent)
        return history.score

    def insert_after(self, extent: Extent, front: Extent) -> None:
        super().insert_after(extent, front)
        if history_of(front).score:
            self._protected.append(front)
