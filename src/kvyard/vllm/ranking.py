"""Ranking of a host cache's chunks by one of kvyard's eviction policies. Knows nothing of vLLM.

A chunk keeps its rank while a transfer reads or writes it, and is only skipped: the duration of a copy doesn't change the
value of a chunk.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Generic, TypeVar

import msgspec

from kvyard.blocks import Retention
from kvyard.blocks.eviction import ORDERS, make_order
from kvyard.blocks.eviction.learning import LearningOrder, learning_order
from kvyard.blocks.extent import DEFAULT_PRIORITY, Extent
from kvyard.blocks.spec import ConfigError
from kvyard.clock import WallClock
from kvyard.errors import KvyardError

ChunkT = TypeVar("ChunkT")


def usable() -> list[str]:
    """Return the eviction policies that need no more than a chunk and its age."""
    return sorted(name for name in ORDERS.names() if learning_order(name) is None)


class RetentionError(KvyardError, ValueError):
    """Wishes for retention that can't be read."""


class Ranked(Generic[ChunkT]):
    """A chunk and its place in the order."""

    __slots__ = ("chunk", "extent", "pinned")

    def __init__(self, chunk: ChunkT, extent: Extent, pinned: bool) -> None:
        self.chunk = chunk
        self.extent = extent
        self.pinned = pinned


class ChunkRanking(Generic[ChunkT]):
    """The chunks of one cache by their keys."""

    def __init__(self, order: str, now: Callable[[], int] | None = None) -> None:
        """``order``: a name of ``kvyard.blocks.eviction.ORDERS``; ``now`` is this process's time unless given. Raises
        ``ConfigError`` for an unknown order, and for one that learns from uses.
        """
        now = now or WallClock().now
        self._name = order
        self._now = now
        self._chunks: dict[bytes, Ranked[ChunkT]] = {}
        self._keys: dict[int, bytes] = {}
        """By the number that an extent has instead of block ids."""
        self._order = make_order(order, now)
        if isinstance(self._order, LearningOrder):
            raise ConfigError(
                f"eviction policy {order} depends on who used a block, which vLLM does not report: choose one of "
                f"{', '.join(usable())}"
            )
        self._number = 0

    @property
    def reads_priorities(self) -> bool:
        """Return true if retention priorities make a difference."""
        return self._order.reads_priorities

    def get(self, key: bytes) -> ChunkT | None:
        """Return the chunk of ``key``, if it is here."""
        ranked = self._chunks.get(key)
        return ranked.chunk if ranked is not None else None

    def insert(
        self, key: bytes, chunk: ChunkT, *, pinned: bool, priority: int = DEFAULT_PRIORITY, expires: int | None = None
    ) -> None:
        """Insert ``key`` as the most recently used. ``expires``: how long its priority lasts, in nanoseconds."""
        self._number += 1
        extent = Extent([self._number], 0, 0, priority)
        extent.expires = expires
        self._chunks[key] = Ranked(chunk, extent, pinned)
        self._keys[self._number] = key
        self._order.push(extent)

    def remove(self, key: bytes) -> ChunkT:
        """Remove ``key``. Raises ``KeyError`` if it isn't here."""
        ranked = self._chunks.pop(key)
        self._order.remove(ranked.extent)
        del self._keys[ranked.extent.ids[0]]
        return ranked.chunk

    def touch(self, keys: Sequence[bytes]) -> None:
        """``keys``, first to last of a prompt, were used: what is here of them is the most recently used, the first last."""
        for key in reversed(keys):
            ranked = self._chunks.get(key)
            if ranked is not None:
                self._order.remove(ranked.extent)
                self._order.push(ranked.extent)

    def pin(self, key: bytes, pinned: bool) -> None:
        """Pin ``key`` for a transfer, or unpin it. Raises ``KeyError`` if it isn't here."""
        self._chunks[key].pinned = pinned

    def evict(self, count: int, protected: Collection[bytes]) -> list[tuple[bytes, ChunkT]] | None:
        """Take out the ``count`` chunks that go next, of those that are neither pinned nor ``protected``; ``None``, changing
        nothing, if there are fewer.
        """
        victims: list[bytes] = []
        for extent in self._order:
            if len(victims) == count:
                break
            key = self._keys[extent.ids[0]]
            if not self._chunks[key].pinned and key not in protected:
                victims.append(key)
        if len(victims) < count:
            return None
        return [(key, self.remove(key)) for key in victims]

    def clear(self) -> None:
        """Remove everything."""
        self._chunks.clear()
        self._keys.clear()
        self._order = make_order(self._name, self._now)

    def __iter__(self) -> Iterator[bytes]:
        """Return all keys, next victim first."""
        return (self._keys[extent.ids[0]] for extent in self._order)


def read_wishes(raw: object) -> tuple[Retention, ...]:
    """Return a request's wishes for retention: a list of ``{"start":0,"stop":512,"priority":80,"duration":null}``, where
    ``stop`` may be null and durations are nanoseconds. Raises ``RetentionError`` for anything else.
    """
    if raw is None:
        return ()
    try:
        return tuple(msgspec.convert(raw, list[Retention]))
    except (msgspec.ValidationError, KvyardError) as bad:
        raise RetentionError(f"retention must be a list of start, stop, priority and duration: {bad}") from None
