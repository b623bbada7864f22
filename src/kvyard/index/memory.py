"""The index in memory: a dict from key to location, and segments that hold rows by runs.

What it costs: a store or removal goes by the number of different rows it touches, plus one dict entry for each block that
nobody held before or nobody holds any more. A lookup probes the dict once per segment on the prompt's way, and compares the
last key of each; depth hardly matters. One place is cleared by looking at its own segments only.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence

from kvyard.errors import KvyardError
from kvyard.index.backend import BACKENDS, Rows, Usage
from kvyard.index.segment import Segment, agreeing

_exhaust = deque[None](maxlen=0).extend
"""Runs an iterator for its effects, at the speed of built-ins."""
_BITS = 12
_MOST = 1 << _BITS
_OFFSET = _MOST - 1
_KEY_BYTES = 168
"""A key's integer (48), its location's (32), its slot in a dict (up to 80) and in an array (8)."""
_SEGMENT_BYTES = 1024
"""Its objects, and a few runs."""


class MemoryIndex:
    """A ``Backend``. ``budget`` bytes at most are kept, by an estimate; the least recently useful segments go first."""

    def __init__(self, *, budget: int | None = None) -> None:
        """Raises ``KvyardError`` for a budget that is too small for a single segment."""
        if budget is not None and budget < _SEGMENT_BYTES + _MOST * _KEY_BYTES:
            raise KvyardError(f"an index takes at least {_SEGMENT_BYTES + _MOST * _KEY_BYTES} bytes, not {budget}")
        self.budget = budget
        self._where: dict[int, int] = {}
        """The location of every key that somebody holds."""
        self._segments: dict[int, Segment] = {}
        """By number; in the order in which eviction looks at them."""
        self._free: list[int] = []
        self._next = 0
        self._held: list[set[int]] = []
        """Per place the segments that it holds something of."""
        self._evicted = 0

    # -- changes ----------------------------------------------------------------------------------------------------

    def store(self, place: int, keys: Sequence[int], parent: int | None = None) -> Sequence[int]:
        """See ``Backend``."""
        bit = 1 << place
        held = self._held_by(place)
        where, segments = self._where, self._segments
        repeated: list[int] = []
        at, count = 0, len(keys)
        while at < count:
            loc = where.get(keys[at])
            if loc is None:
                at = self._store_fresh(held, bit, keys, at, keys[at - 1] if at else parent)
                continue
            number = loc >> _BITS
            segment = segments[number]
            off = loc & _OFFSET
            end = off + segment.agree(off, keys, at)
            stop = off
            before = segment.paint(off, end, bit, 0)
            for low, high, old in before:
                if not old and not self._revive(segment, low, high):
                    # Dead here and alive elsewhere: what was painted from here on must not stand.
                    for undo_low, undo_high, was in before:
                        if undo_low >= low and not was & bit:
                            segment.paint(undo_low, undo_high, 0, bit)
                    break
                if old & bit:
                    repeated += segment.keys[low:high]
                stop = high
            held.add(number)
            segment.touched = True
            at += stop - off
        if self.budget is not None:
            self._shrink()
        return repeated

    def remove(self, place: int, keys: Sequence[int]) -> int:
        """See ``Backend``."""
        bit = 1 << place
        where, segments = self._where, self._segments
        keys = keys if isinstance(keys, list) else list(keys)
        removed = at = 0
        elsewhere: list[int] = []
        while at < len(keys):
            loc = where.get(keys[at])
            if loc is None:
                at += 1
                continue
            number = loc >> _BITS
            segment = segments[number]
            off = loc & _OFFSET
            count, step = segment.span(off, keys, at)
            low = off if step > 0 else off - count + 1
            for piece_low, piece_high, old in segment.paint(low, low + count, 0, bit):
                if not old:
                    elsewhere += segment.keys[piece_low:piece_high]
                elif old & bit:
                    removed += piece_high - piece_low
                    if old == bit:
                        _exhaust(map(where.__delitem__, segment.keys[piece_low:piece_high]))
            self._settle(number, segment, place, bit)
            at += count
        if elsewhere:
            removed += self.remove(place, [key for key in elsewhere if key in where])
        return removed

    def clear(self, place: int) -> int:
        """See ``Backend``."""
        bit = 1 << place
        where, removed = self._where, 0
        for number in list(self._held_by(place)):
            segment = self._segments[number]
            for low, high, old in segment.paint(0, len(segment.keys), 0, bit):
                if old & bit:
                    removed += high - low
                    if old == bit:
                        _exhaust(map(where.__delitem__, segment.keys[low:high]))
            self._settle(number, segment, place, bit)
        return removed

    # -- questions --------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[int], through_holes: bool = False) -> Rows:
        """See ``Backend``."""
        find, segments = self._where.get, self._segments
        rows: Rows = []
        at, count, last = 0, len(keys), 0
        while at < count:
            loc = find(keys[at])
            if loc is None:
                if not through_holes:
                    break
                where = self._where
                at = next((i for i in range(at + 1, count) if keys[i] in where), count)
                if at == count:
                    break
                rows.append((at, 0))
                last = 0
                continue
            segment = segments[loc >> _BITS]
            segment.touched = True
            off = loc & _OFFSET
            mine, stops, masks = segment.keys, segment.stops, segment.masks
            run = bisect_right(stops, off)
            # Run by run, since two texts mostly part where rows change: two comparisons each, and no search.
            while masks[run]:
                length = stops[run] - off
                if length > count - at:
                    length = count - at
                agrees = mine[off + length - 1] == keys[at + length - 1]
                if not agrees:
                    length = agreeing(mine, off, keys, at, length)
                at += length
                if masks[run] == last:
                    rows[-1] = (at, last)
                else:
                    last = masks[run]
                    rows.append((at, last))
                off += length
                run += 1
                if not agrees or at == count or run == len(stops) or mine[off] != keys[at]:
                    break
        return rows

    def holds(self, place: int, key: int) -> bool:
        """See ``Backend``."""
        loc = self._where.get(key)
        return loc is not None and self._segments[loc >> _BITS].live(loc & _OFFSET)[1] >> place & 1 == 1

    def held(self, place: int) -> Iterator[Sequence[int]]:
        """See ``Backend``."""
        for number in sorted(self._held_by(place)):
            segment = self._segments[number]
            start = low = 0
            for stop, mask in zip([*segment.stops, len(segment.keys)], [*segment.masks, 0], strict=True):
                if not mask >> place & 1:
                    if low < start:
                        yield segment.keys[low:start].tolist()
                    low = stop
                start = stop

    def usage(self) -> Usage:
        """See ``Backend``."""
        return Usage(
            blocks=len(self._where),
            rows=sum(sum(1 for mask in segment.masks if mask) for segment in self._segments.values()),
            bytes=self._bytes(),
            evicted=self._evicted,
        )

    def check_integrity(self) -> None:
        """See ``Backend``."""
        living = 0
        for number, segment in self._segments.items():
            assert segment.base == number << _BITS and 0 < len(segment.keys) <= _MOST, (
                f"segment {number} is out of shape"
            )
            assert segment.stops == sorted(set(segment.stops)) and segment.stops[-1] == len(segment.keys)
            assert all(a != b for a, b in zip(segment.masks, segment.masks[1:], strict=False)), (
                "equal rows side by side"
            )
            assert segment.masks[-1], f"segment {number} has a dead end"
            start = 0
            for stop, mask in zip(segment.stops, segment.masks, strict=True):
                if mask:
                    living += stop - start
                    for off in range(start, stop):
                        assert self._where.get(segment.keys[off]) == segment.base + off, "a key is lost"
                start = stop
        assert living == len(self._where), f"{len(self._where)} keys are known but {living} live"
        for place, numbers in enumerate(self._held):
            holding = {n for n, s in self._segments.items() if any(mask >> place & 1 for mask in s.masks)}
            assert holding == numbers, f"place {place} holds {holding}, not {numbers}"

    # -- inside -----------------------------------------------------------------------------------------------------

    def _held_by(self, place: int) -> set[int]:
        held = self._held
        while len(held) <= place:
            held.append(set())
        return held[place]

    def _store_fresh(self, held: set[int], bit: int, keys: Sequence[int], at: int, parent: int | None) -> int:
        """Store what nobody holds, from ``at`` up to the next key that somebody does; returns where that is."""
        where = self._where
        fresh = keys[at:] if at else keys
        if not where.keys().isdisjoint(fresh):
            fresh = fresh[: next(i for i, key in enumerate(fresh) if key in where)]
        loc = where.get(parent) if parent is not None else None
        if loc is not None:
            segment = self._segments[loc >> _BITS]
            off = (loc & _OFFSET) + 1
            if off < len(segment.keys):
                if segment.keys[off] == fresh[0]:
                    return at + self._store_on_dead(held, bit, segment, off, fresh)
            elif off + len(fresh) <= _MOST:
                return at + self._append(held, bit, segment, fresh)
        return at + self._append(held, bit, self._open(), fresh[:_MOST])

    def _append(self, held: set[int], bit: int, segment: Segment, fresh: Sequence[int]) -> int:
        packed = array("Q", fresh)  # raises, before anything is changed, for what is no key
        start = segment.base + len(segment.keys)
        where, before = self._where, len(self._where)
        where.update(zip(fresh, range(start, start + len(fresh)), strict=True))
        if len(where) - before != len(fresh):
            # A key is listed twice. Go as far as the first that is; the next round finds it held.
            for key in fresh:
                where.pop(key, None)
            fresh = fresh[: next(i for i, key in enumerate(fresh) if key in fresh[:i])]
            where.update(zip(fresh, range(start, start + len(fresh)), strict=True))
            packed = packed[: len(fresh)]
        segment.extend(packed, bit)
        held.add(segment.base >> _BITS)
        return len(fresh)

    def _store_on_dead(self, held: set[int], bit: int, segment: Segment, off: int, fresh: Sequence[int]) -> int:
        """Store ``fresh`` where it was before it died, as far as that goes."""
        stop = min(segment.live(off)[0], off + segment.agree(off, fresh, 0))
        segment.paint(off, stop, bit, 0)
        self._where.update(zip(segment.keys[off:stop], range(segment.base + off, segment.base + stop), strict=True))
        held.add(segment.base >> _BITS)
        return stop - off

    def _revive(self, segment: Segment, low: int, high: int) -> bool:
        """Find the keys of a dead stretch here again, unless they live elsewhere; returns whether it did."""
        keys = segment.keys[low:high]
        if not self._where.keys().isdisjoint(keys):
            return False
        self._where.update(zip(keys, range(segment.base + low, segment.base + high), strict=True))
        return True

    def _open(self) -> Segment:
        if self._free:
            number = self._free.pop()
        else:
            number, self._next = self._next, self._next + 1
        segment = self._segments[number] = Segment(number << _BITS)
        return segment

    def _settle(self, number: int, segment: Segment, place: int, bit: int) -> None:
        """``place`` let go of something in ``segment``: tidy up."""
        masks = segment.masks
        for mask in masks:
            if mask & bit:
                break
        else:
            self._held_by(place).discard(number)
        if not masks[-1]:
            segment.trim()
            if not masks:
                del self._segments[number]
                self._free.append(number)

    def _bytes(self) -> int:
        # Runs are few; what they may come to is in the price of a segment.
        return len(self._where) * _KEY_BYTES + len(self._segments) * _SEGMENT_BYTES

    def _shrink(self) -> None:
        """Forget segments until the budget is kept; one that was of use gets a second chance."""
        assert self.budget is not None
        segments = self._segments
        while self._bytes() > self.budget:
            number = next(iter(segments))
            segment = segments.pop(number)
            if segment.touched:
                segment.touched = False
                segments[number] = segment
                continue
            self._forget(number, segment)

    def _forget(self, number: int, segment: Segment) -> None:
        start = union = 0
        for stop, mask in zip(segment.stops, segment.masks, strict=True):
            if mask:
                union |= mask
                for key in segment.keys[start:stop]:
                    del self._where[key]
                self._evicted += stop - start
            start = stop
        for place, held in enumerate(self._held):
            if union >> place & 1:
                held.discard(number)
        self._free.append(number)


BACKENDS["memory"] = MemoryIndex
