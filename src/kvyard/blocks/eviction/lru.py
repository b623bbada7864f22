"""The order of vLLM: what was released first is evicted first."""

from collections.abc import Callable, Iterator

from mypy_extensions import mypyc_attr

from kvyard.blocks.extent import Extent


@mypyc_attr(allow_interpreted_subclasses=True)  # orders of one's own are made of it
class LruOrder:
    """Least recently used first: a doubly linked line of extents, of which other orders can be made too."""

    __slots__ = ("_first", "_last", "reads_priorities")

    def __init__(self, now: Callable[[], int] | None = None) -> None:
        """``now`` is for orders that go by time; this one doesn't."""
        self.reads_priorities = False
        # Two sentinels, so that no verb has an edge case.
        self._first = Extent([], 0, 0)
        self._last = Extent([], 0, 0)
        self._first.after = self._last
        self._last.before = self._first

    def push(self, extent: Extent) -> None:
        tail = self._last.before
        assert tail is not None
        self.insert_after(tail, extent)

    def push_front(self, extent: Extent) -> None:
        self.insert_after(self._first, extent)

    def remove(self, extent: Extent) -> None:
        before, after = extent.before, extent.after
        assert before is not None
        assert after is not None
        before.after = after
        after.before = before
        extent.before = extent.after = None

    def expire(self) -> None:
        """Age alone doesn't run out."""

    def insert_after(self, extent: Extent, front: Extent) -> None:
        after = extent.after
        assert after is not None
        extent.after = front
        front.before = extent
        front.after = after
        after.before = front

    def head(self) -> Extent:
        first = self._first.after
        assert first is not None
        if first is self._last:
            raise IndexError("no extent is left to evict")
        return first

    def empty(self) -> bool:
        return self._first.after is self._last

    def __iter__(self) -> Iterator[Extent]:
        extent = self._first.after
        while extent is not None and extent is not self._last:
            yield extent
            extent = extent.after
