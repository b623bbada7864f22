"""Eviction orders: in which order cached extents without a reference are evicted. Each is one file and one entry of ``ORDERS``.

An order is a sequence of extents, next victim first. Inside an extent the last position goes first, since a chain is
worth less without its head than without its tail. An order only sees extents, not what they contain.

An installed package adds its own by an entry point of the group ``kvyard.eviction``, a program by ``ORDERS.register``.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

from kvyard.blocks.extent import Extent
from kvyard.blocks.spec import ConfigError
from kvyard.registry import Registry


class EvictionOrder(Protocol):
    """What the pool asks of an order. All verbs but iteration take constant (or logarithmic) time."""

    reads_priorities: bool
    """Whether it goes by the retention priorities of extents, and by the time at which those expire."""

    def push(self, extent: Extent) -> None:
        """The last holder let go of ``extent``: it becomes a candidate, after its equals."""

    def push_front(self, extent: Extent) -> None:
        """``extent`` was taken from the head and comes back there: it is the next to go among its equals."""

    def remove(self, extent: Extent) -> None:
        """``extent`` was hit or is gone: it is no candidate any more."""

    def insert_after(self, extent: Extent, front: Extent) -> None:
        """``front`` was split off ``extent``, a candidate; it is the next to go after it."""

    def head(self) -> Extent:
        """The next victim. Raises ``IndexError`` when there is none."""

    def __iter__(self) -> Iterator[Extent]:
        """All candidates, next victim first."""


ORDERS: Registry[Callable[[Callable[[], int]], EvictionOrder]] = Registry(
    "eviction order",
    "kvyard.eviction",
    {
        "lru": "kvyard.blocks.eviction.lru:LruOrder",
        "priority": "kvyard.blocks.eviction.priority:PriorityOrder",
    },
)
"""An entry takes a function that tells the time (nanoseconds) and makes an empty order."""


def make_order(name: str, now: Callable[[], int]) -> EvictionOrder:
    """The order called ``name``. Raises ``ConfigError`` for an unknown one."""
    if name not in ORDERS:
        raise ConfigError(f"unknown eviction order {name!r}; choose one of {', '.join(sorted(ORDERS.names()))}")
    return ORDERS.get(name)(now)


def eviction_with_hints(name: str) -> str:
    """The order that heeds hints and is ``name`` without any. Raises ``ConfigError`` where there is none."""
    if name not in ("lru", "priority"):
        raise ConfigError(f"hints need eviction lru or priority, not {name}: leave one of the two out")
    return "priority"
