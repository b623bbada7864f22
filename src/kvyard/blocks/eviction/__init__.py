"""Eviction policies: they order cached extents without a reference. Each is one file and one entry of ``ORDERS``.

A policy keeps a sequence of extents, next victim first. Inside an extent the last position is evicted first, since a
chain without its head is useless, and one without its tail isn't. A policy sees extents, not their content. A policy that
depends on the requests that used them derives from ``LearningOrder``.

An installed package adds its own by an entry point of the group ``kvyard.eviction``, a program by ``ORDERS.register``.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from kvyard.blocks.extent import Extent
from kvyard.blocks.spec import ConfigError
from kvyard.registry import Registry


class EvictionOrder(Protocol):
    """Interface of an eviction policy for the block pool. All verbs but iteration take constant (or logarithmic) time."""

    reads_priorities: bool
    """True if it reads the retention priorities of extents, and the time at which those expire."""

    def push(self, extent: Extent) -> None:
        """Add ``extent``, whose last reference was released, as a candidate, after its equals."""

    def push_front(self, extent: Extent) -> None:
        """``extent`` was taken from the head and comes back there: it is the next to go among its equals."""

    def remove(self, extent: Extent) -> None:
        """``extent`` was hit or is gone: it is no candidate any more."""

    def insert_after(self, extent: Extent, front: Extent) -> None:
        """``front`` was split off ``extent``, a candidate; it is the next to go after it."""

    def expire(self) -> None:
        """Priorities that have run out by now fall back; nothing in an order that has none."""

    def head(self) -> Extent:
        """Return the next victim. Raises ``IndexError`` when there is none."""

    def __iter__(self) -> Iterator[Extent]:
        """Return all candidates, next victim first."""


_HERE = "kvyard.blocks.eviction"
ORDERS: Registry[Callable[..., EvictionOrder]] = Registry(
    "eviction policy",
    "kvyard.eviction",
    {
        "lru": f"{_HERE}.lru:LruOrder",
        "priority": f"{_HERE}.priority:PriorityOrder",
        "slru": f"{_HERE}.slru:SlruOrder",
        "lfu": f"{_HERE}.lfu:LfuOrder",
        "s3-fifo": f"{_HERE}.s3_fifo:S3FifoOrder",
        "t-lru": f"{_HERE}.t_lru:TailLruOrder",
        "workload-aware": f"{_HERE}.workload_aware:WorkloadAwareOrder",
        "hits-per-token": f"{_HERE}.hits_per_token:HitsPerTokenOrder",
        "queue-informed": f"{_HERE}.queue_informed:QueueInformedOrder",
        "marconi": f"{_HERE}.marconi:MarconiOrder",
        "belady": f"{_HERE}.belady:BeladyOrder",
    },
    error=ConfigError,
)
"""An entry takes a function that returns the time (nanoseconds) and makes an empty order. One with ``OPTIONS`` takes a mapping
of all their values too."""


def make_order(name: str, now: Callable[[], int], options: Mapping[str, float] | None = None) -> EvictionOrder:
    """Return the order called ``name``. Raises ``ConfigError`` for an unknown one, and for an option that it doesn't have."""
    values = ORDERS.resolve(name, options or {})
    return ORDERS.get(name)(now, values) if values else ORDERS.get(name)(now)


def eviction_with_hints(name: str) -> str:
    """Return the order that heeds hints and is ``name`` without any. Raises ``ConfigError`` if there is none."""
    if name not in ("lru", "priority"):
        raise ConfigError(f"hints need eviction lru or priority, not {name}: leave one of the two out")
    return "priority"
