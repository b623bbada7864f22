"""The dedup filter: a copy that was announced twice is gone only when it was taken back twice.

Engines announce one block several times for good reasons: two physical copies of one hash, or overlapping offload chunks
that list the same block. Passing the first removal on would hide a copy that is still there (llm-d #680, Dynamo #8012).

The filter sits between decoding and the index, and is not a wrapper around the index, for two reasons. It may only count
what took effect, and whether a store did (its parent was known, its hashes were resolved, the index accepted it) is known
to the feed, not to a backend. And it mirrors what was *announced*, by stream order, while a backend may evict rows to stay in
its budget: a count that lived in there would be evicted with them, and a later removal would then hide a living copy.

A count is (holder, tier, group, hash); a place is the first three. The index's row is a count of one, so only counts beyond it
are kept here: a fleet that never repeats itself pays nothing.

At the cap a repetition isn't counted: its first removal then takes the row away. That errs on the side of a copy not known,
never of a copy that isn't there, and is counted.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import TypeVar

from kvyard.blocks.spans import clip
from kvyard.hashing import Chain, Key
from kvyard.index.dedup_counters import DedupCounters

log = logging.getLogger(__name__)

KeyT = TypeVar("KeyT", bound=Key)


class DedupFilter:
    """Announcements beyond the first, per place and hash. Never negative."""

    def __init__(self, *, cap: int = 1 << 20, enabled: bool = True) -> None:
        """``cap`` bounds the hashes with a count above one. Not ``enabled``, it counts nothing and forwards all."""
        self.cap = cap
        self.enabled = enabled
        self.counters = DedupCounters()
        self._beyond: dict[int, dict[Key, int]] = {}
        """Per place the hashes that were announced more than once, and how much more."""
        self.size = 0
        """Number of hashes with a count above one."""

    @property
    def outstanding(self) -> int:
        """References beyond the first that haven't been taken back. With the rows: all there are."""
        return sum(sum(counts.values()) for counts in self._beyond.values())

    def outstanding_at(self, places: Iterable[int]) -> int:
        """Return references beyond the first at ``places`` that haven't been taken back."""
        return sum(sum(self._beyond.get(place, {}).values()) for place in places)

    def count(self, place: int, key: Key) -> int:
        """Return the number of announcements of ``key`` beyond the first."""
        return self._beyond.get(place, {}).get(key, 0)

    def repeated(self, place: int, keys: Sequence[Key]) -> None:
        """Count once more, one by one, ``keys`` that the place held already when a store took effect."""
        if not keys or not self.enabled:
            return
        counts = self._beyond.setdefault(place, {})
        for key in keys:
            known = counts.get(key)
            if known is not None:
                counts[key] = known + 1
            elif self.size < self.cap:
                counts[key] = 1
                self.size += 1
            else:
                self.counters.uncounted += 1
        if not counts:
            del self._beyond[place]

    def removed(self, place: int, keys: Sequence[KeyT]) -> Sequence[KeyT]:
        """Count a removal and return the keys to pass on, in order, each as often as it must be. Unknown keys always are."""
        counts = self._beyond.get(place)
        if counts is None or counts.keys().isdisjoint(keys):
            self.counters.forwarded += len(keys)
            return keys
        forward: list[KeyT] = []
        for key in keys:
            known = counts.get(key)
            if known is None:
                forward.append(key)
            elif known > 1:
                counts[key] = known - 1
            else:
                del counts[key]
                self.size -= 1
        if not counts:
            del self._beyond[place]
        suppressed = len(keys) - len(forward)
        self.counters.forwarded += len(forward)
        self.counters.suppressed += suppressed
        if suppressed:
            log.debug("place %d: %d removed, %d forwarded, %d suppressed", place, len(keys), len(forward), suppressed)
        return forward

    def removed_spans(self, place: int, chain: Chain, start: int, stop: int) -> list[tuple[int, int]]:
        """Return ``removed`` for blocks ``start`` to ``stop`` of a chain: the blocks to pass on, as intervals.

        Hashes are looked at only where something of the place was repeated: elsewhere the cost doesn't depend on the length.
        """
        if place not in self._beyond:
            self.counters.forwarded += stop - start
            return [(start, stop)]
        # The hashes of a chain differ, so each is passed on once or not at all.
        left = set(self.removed(place, keys := chain.hashes(start, stop)))
        return clip([(position, position + 1) for position, key in enumerate(keys, start) if key in left], start, stop)

    def clear(self, place: int) -> None:
        """Discard a place's counts; the caller clears its rows too."""
        self.size -= len(self._beyond.pop(place, ()))

    def snapshot(self, place: int) -> list[tuple[Key, int]]:
        """Return a place's counts above one, as ``count`` gives them."""
        return list(self._beyond.get(place, {}).items())

    def restore(self, place: int, counts: Iterable[tuple[Key, int]]) -> None:
        """Count the copies of a snapshot, up to the cap."""
        for key, count in counts:
            for _ in range(count):
                self.repeated(place, [key])

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless every count is positive and the size right (I11)."""
        assert all(counts for counts in self._beyond.values()), "an empty place is kept"
        assert all(count > 0 for counts in self._beyond.values() for count in counts.values()), "a count below one"
        assert self.size == sum(map(len, self._beyond.values())), "the size is wrong"
        assert self.size <= self.cap, "over the cap"
