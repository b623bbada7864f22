"""Eviction policies that learn: they receive every use, every eviction and, if they ask, the waiting requests.

A use is reported when a request releases its blocks, held by others or not: once for each request and block. So the policy
knows of it before the blocks become candidates. A lower tier reports a use when a request matches pages there or stores
them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

from kvyard.blocks.eviction import ORDERS
from kvyard.blocks.extent import Extent, UseHistory
from kvyard.blocks.use import Use
from kvyard.registry import Options, defaults

Split = Callable[[Extent, int], Extent]
"""Function that splits off the given number of leading blocks of an extent; returns the earlier part."""


class LearningOrder:
    """Interface beyond ``EvictionOrder``, and the default behaviour of most policies that learn."""

    OPTIONS: ClassVar[Options] = {}
    """Numbers that people may set."""
    reads_priorities = False
    reads_time = False
    """True if it depends on the clock."""
    reads_queue = False
    """True if it reads the waiting requests (``protect``). Such a policy is for the device of one engine."""
    needs_future = False
    """True if it needs ``RequestFacts.next_uses``, which only the replay of a trace has."""
    foreseeable = True
    """True if iteration gives the next victims, however many blocks are evicted in one go."""

    def __init__(self, now: Callable[[], int], options: Mapping[str, float] | None = None) -> None:
        self.now = now
        self.options = defaults(self.OPTIONS) if options is None else dict(options)
        self.queue_depth = 0
        """Number of waiting requests that it reads."""
        self.capacity = 0
        """Blocks of the pool."""
        self._split: Split | None = None

    def attach(self, capacity: int, split: Split) -> None:
        """Attach to a pool of ``capacity`` blocks; ``split`` splits its extents."""
        self.capacity = capacity
        self._split = split

    # -- events -----------------------------------------------------------------------------------------------------

    def used(self, extents: Sequence[Extent], use: Use, block_size: int, states: bool = False) -> list[Extent]:
        """Note that a request used ``extents`` of one group, given in order of position and held by it or by no request.

        ``states``: each block is a state that stands for all before it. Returns them as they are now: where parts are to be
        treated differently they are split, and none may be a candidate then.
        """
        use.time = self.now()
        fresh = sum([len(extent.ids) for extent in extents if extent.history is None and extent.cached])
        parts: list[Extent] = []
        for extent in extents:
            if not extent.cached:
                parts.append(extent)  # it will be no candidate
                continue
            for part in self.cut(extent, self.bounds(extent, use, block_size, states)):
                history = part.history
                if history is None:
                    history = part.history = UseHistory()
                    history.size = fresh * block_size
                previous = history.use
                again = previous is not None and previous.request == use.request
                if not again:
                    history.uses += 1
                history.use = self.note(part, history, use, block_size, again)
                parts.append(part)
        return parts

    def bounds(self, extent: Extent, use: Use, block_size: int, states: bool) -> Sequence[int]:
        """Return the positions, in order, at which ``extent`` must be split because its parts differ from now on."""
        return ()

    def note(self, extent: Extent, history: UseHistory, use: Use, block_size: int, again: bool) -> Use:
        """Note a use of ``extent``; ``history.use`` is still the previous one. ``again``: that was by the same request.

        Returns the use to remember as its latest.
        """
        return use

    def evicted(self, extent: Extent) -> None:
        """``extent``, the head, is about to be evicted; ``remove`` follows."""

    def protect(self, waiting: Sequence[Sequence[Extent]]) -> None:
        """Protect the extents that waiting requests would find cached, those of the next request first."""

    def cut(self, extent: Extent, bounds: Sequence[int]) -> list[Extent]:
        """Return the parts of ``extent`` between ``bounds``, in order of position."""
        parts: list[Extent] = []
        for bound in bounds:
            if extent.start < bound < extent.start + len(extent.ids):
                assert self._split is not None
                parts.append(self._split(extent, bound - extent.start))
        parts.append(extent)
        return parts

    # -- asked: as EvictionOrder says -----------------------------------------------------------------------------------

    def push(self, extent: Extent) -> None:
        raise NotImplementedError

    def push_front(self, extent: Extent) -> None:
        raise NotImplementedError

    def remove(self, extent: Extent) -> None:
        raise NotImplementedError

    def insert_after(self, extent: Extent, front: Extent) -> None:
        raise NotImplementedError

    def expire(self) -> None:
        """No priorities are read here, so none run out."""

    def head(self) -> Extent:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Extent]:
        raise NotImplementedError


def learning_order(name: str) -> type[LearningOrder] | None:
    """Return the order called ``name``, if it is one of these. Raises ``KvyardError`` for an unknown one."""
    order = ORDERS.get(name)
    return order if isinstance(order, type) and issubclass(order, LearningOrder) else None


def history_of(extent: Extent) -> UseHistory:
    """Return the history of ``extent``; an empty one before its first use."""
    history = extent.history
    if history is None:
        history = extent.history = UseHistory()
    return history
