"""The outbox: a bounded queue of batches between the engine and the thread that sends them.

The engine must never wait for a slow consumer, and a consumer must never go on believing in a block that is gone. A plain
bounded queue breaks one or the other. This one, when full, throws away all it holds and asks for the whole map again; the
sequence numbers of what it threw away stay missing, so the loss shows. A clear takes the place of every Removed that was
thrown away, so none is ever missed: a consumer that drains the queue always ends at the map.
"""

from collections import deque
from collections.abc import Callable
from threading import Lock

import msgspec

from kvyard.events.types import Cleared, EventBatch


class OutboxCounters(msgspec.Struct):
    """Counters of an outbox."""

    offered: int = 0
    taken: int = 0
    overflows: int = 0
    lost_batches: int = 0
    lost_events: int = 0


class Outbox:
    """``offer`` is for the engine's thread, ``take`` for the sender's. Neither waits."""

    def __init__(self, recover: Callable[[int], EventBatch], max_events: int = 100_000) -> None:
        """``recover`` gives the batch that replaces everything lost (``Batcher.resync``); it runs inside ``offer``.

        ``max_events`` bounds the events that wait. A batch that begins with a clear is always taken in, since nothing
        could replace it. Raises ``ValueError`` for a bound below 1.
        """
        if max_events < 1:
            raise ValueError(f"an outbox needs room for at least one event, got {max_events}")
        self.counters = OutboxCounters()
        self.waiting_events = 0
        """Events that count against the bound now."""
        self._max_events = max_events
        self._recover = recover
        self._queue: deque[EventBatch] = deque()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._queue)

    def offer(self, batch: EventBatch, now: int) -> bool:
        """Queue ``batch``. Returns whether it fitted: where not, everything was replaced by a resync."""
        self.counters.offered += 1
        weight = _weight(batch)
        with self._lock:
            fits = weight == 0 or self.waiting_events + weight <= self._max_events
            if fits:
                self.waiting_events += weight
                self._queue.append(batch)
            else:
                self.counters.overflows += 1
                self.counters.lost_batches += len(self._queue) + 1
                self.counters.lost_events += sum(len(lost.events) for lost in self._queue) + len(batch.events)
                self._queue.clear()
                self.waiting_events = 0
                self._queue.append(self._recover(now))
        return fits

    def take(self) -> EventBatch | None:
        """Return the oldest batch; ``None`` if there is none."""
        with self._lock:
            if not self._queue:
                return None
            batch = self._queue.popleft()
            self.waiting_events -= _weight(batch)
            self.counters.taken += 1
            return batch


def _weight(batch: EventBatch) -> int:
    return 0 if batch.events and isinstance(batch.events[0], Cleared) else len(batch.events)
