"""The index in memory: a dict from key to location, and segments that hold rows by runs.

Costs: a store or removal depends on the number of different rows it touches, plus one dict entry for each block that becomes
held or is no longer held. The common cases (a chain continues where it ended, a replica fills up, a cache evicts from the tail)
touch one run of one segment. A lookup probes the dict once per segment of the prompt and compares the last key of each, so
depth hardly matters. Clearing a place reads its own segments only.
"""

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import TypeAlias

from kvyard.errors import KvyardError
from kvyard.hashing.prefix_tree import common_length, paint, parting, repaint
from kvyard.index.backend import Rows, Usage
from kvyard.index.bits import bits

_exhaust = deque[int](maxlen=0).extend
"""Runs an iterator for its effects, at the speed of built-ins."""
_BITS = 12
_MOST = 1 << _BITS
_OFFSET = _MOST - 1
_KEY_BYTES = 168
"""A key's integer (48), its location's (32), its slot in a dict (up to 80) and in an array (8)."""
_SEGMENT_BYTES = 1024
"""Its objects, and a few runs."""


Painted: TypeAlias = tuple[int, int, int]
"""Offsets from and to, and the row that was there."""


class Segment:
    """Up to a few thousand consecutive blocks of one chain. Offsets count from its first block.

    Keys are packed, rows are run-length encoded: a run is where it ends and one integer. A run whose row is 0 is *dead*:
    no place holds it, its keys may live in another segment by now, and it is only kept because something around it lives.
    """

    __slots__ = ("base", "fork", "keys", "masks", "stops", "touched")

    def __init__(self, base: int) -> None:
        self.base = base
        """Addend that turns an offset into the location that the index keeps for a key."""
        self.keys = array("Q")
        self.stops: list[int] = []
        self.masks: list[int] = []
        self.fork = 0
        """Offset at which another chain last left this one; only a guess."""
        self.touched = False
        """True if it was used since eviction last visited it."""

    def grow(self, stop: int, mask: int) -> None:
        """Give the row ``mask`` to what was added to ``keys``, up to ``stop``."""
        masks = self.masks
        if masks and masks[-1] == mask:
            self.stops[-1] = stop
        else:
            self.stops.append(stop)
            masks.append(mask)

    def agree(self, off: int, keys: Sequence[int], first: int) -> int:
        """Return the number of keys from ``off`` on that equal those of the chain ``keys`` from ``first`` on; at least one
        does.

        Chained keys: equal at a position means equal before it, so this is a handful of comparisons.
        """
        mine = self.keys
        high = min(len(mine) - off, len(keys) - first)
        if mine[off + high - 1] == keys[first + high - 1]:
            return high
        return self.part(off, keys, first, off + high) - off

    def part(self, off: int, keys: Sequence[int], first: int, stop: int) -> int:
        """Return the offset where the chain ``keys`` leaves this one; they agree at ``off`` and no longer just before
        ``stop``.

        Texts often part where others did before (a common template, a conversation begun again), so that is tried first.
        """
        mine, shift = self.keys, first - off
        same, other = off, stop - 1
        fork = self.fork
        if same < fork <= other:
            if mine[fork - 1] != keys[fork - 1 + shift]:
                other = fork - 1
            elif mine[fork] != keys[fork + shift]:
                return fork
            else:
                same = fork
        self.fork = parting(mine, keys, same, other, 0, -shift)
        return self.fork

    def span(self, off: int, keys: Sequence[int], first: int) -> tuple[int, int]:
        """Return how many of ``keys`` from ``first`` on lie here from ``off`` on, in order, and the step: 1 forwards, -1
        backwards.

        These keys are any list, so each is compared; built-in comparison does most of it.
        """
        mine, most = self.keys, len(keys) - first
        if most > 1:
            if off + 1 < len(mine) and mine[off + 1] == keys[first + 1]:
                count = min(most, len(mine) - off)
                return common_length(mine[off : off + count].tolist(), keys[first : first + count]), 1
            if off and mine[off - 1] == keys[first + 1]:
                count = min(most, off + 1)
                return common_length(mine[off - count + 1 : off + 1].tolist()[::-1], keys[first : first + count]), -1
        return 1, 1

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Return every run: from and to where, and its row."""
        return zip([0, *self.stops], self.stops, self.masks, strict=False)

    def live(self, off: int) -> tuple[int, int]:
        """Return the end of the run at ``off``, and its row."""
        run = bisect_right(self.stops, off)
        return self.stops[run], self.masks[run]

    def join(self, off: int, keys: Sequence[int], bit: int) -> bool:
        """Set ``bit`` for all of the chain ``keys``, whose first is at ``off``, where they lie in one living run without it.

        The common case of a store, in one step; says whether it was that.
        """
        mine = self.keys
        end = off + len(keys)
        if end > len(mine) or mine[end - 1] != keys[-1]:
            return False
        run = bisect_right(self.stops, off)
        old = self.masks[run]
        if not old or old & bit or end > self.stops[run]:
            return False
        repaint(self.stops, self.masks, 0, run, off, end, old | bit)
        return True

    def leave(self, low: int, high: int, bit: int) -> int:
        """Unset ``bit`` from ``low`` to ``high`` where that lies in one run that has it: the common case of a removal.

        Returns the row that was there, 0 if nothing was changed because it isn't so.
        """
        run = bisect_right(self.stops, low)
        old = self.masks[run]
        if not old & bit or high > self.stops[run]:
            return 0
        repaint(self.stops, self.masks, 0, run, low, high, old ^ bit)
        return old

    def paint(self, low: int, high: int, add: int, drop: int) -> list[Painted]:
        """Set the bits ``add`` and unset the bits ``drop`` from ``low`` to ``high``; returns what was there before."""
        return paint(self.stops, self.masks, 0, low, high, add, drop)

    def trim(self) -> None:
        """Free a dead end."""
        if self.masks and not self.masks[-1]:
            self.masks.pop()
            self.stops.pop()
            del self.keys[self.stops[-1] if self.stops else 0 :]


class MemoryIndex:
    """A ``IndexBackend``. ``budget`` bytes at most are kept, by an estimate; the least recently useful segments go first."""

    def __init__(
        self, *, budget: int | None = None, forgotten: Callable[[int, Sequence[int]], None] | None = None
    ) -> None:
        """``forgotten`` is called with a place and its keys when the budget evicts them.

        Raises ``KvyardError`` for a budget that is too small for a single segment.
        """
        if budget is not None and budget < _SEGMENT_BYTES + _MOST * _KEY_BYTES:
            raise KvyardError(f"an index takes at least {_SEGMENT_BYTES + _MOST * _KEY_BYTES} bytes, not {budget}")
        self.budget = budget
        self._forgotten = forgotten
        self._where: dict[int, int] = {}
        """The location of every key that is held."""
        self._segments: dict[int, Segment] = {}
        """By number; in the order in which eviction looks at them."""
        self._free: list[int] = []
        self._next = 0
        self._held: list[set[int]] = []
        """Per place the segments that it holds something of."""
        self._evicted = 0

    # -- changes ----------------------------------------------------------------------------------------------------

    def store(self, place: int, keys: Sequence[int], parent: int | None = None) -> Sequence[int]:
        """See ``IndexBackend``."""
        if not isinstance(keys, list):
            keys = list(keys)
        if not keys:
            return ()
        bit = 1 << place
        held = self._held[place] if place < len(self._held) else self._held_by(place)
        repeated: Sequence[int] = ()
        loc = self._where.get(keys[0])
        if loc is None:
            stored = self._store_fresh(held, bit, keys, parent)
            if stored < len(keys):
                repeated = self._store_rest(held, bit, keys, stored)
        else:
            number = loc >> _BITS
            segment = self._segments[number]
            if segment.join(loc & _OFFSET, keys, bit):
                held.add(number)
                segment.touched = True
                return ()
            repeated = self._store_rest(held, bit, keys, 0)
        if self.budget is not None:
            self._shrink()
        return repeated

    def remove(self, place: int, keys: Sequence[int]) -> int:
        """See ``IndexBackend``."""
        bit = 1 << place
        where, segments = self._where, self._segments
        if not isinstance(keys, list):
            keys = list(keys)
        removed = index = 0
        most = len(keys)
        elsewhere: list[int] = []
        while index < most:
            loc = where.get(keys[index])
            if loc is None:
                index += 1
                continue
            number = loc >> _BITS
            segment = segments[number]
            low = loc & _OFFSET
            count = 1
            if most - index > 1:
                count, step = segment.span(low, keys, index)
                if step < 0:
                    low -= count - 1
            old = segment.leave(low, low + count, bit)
            if old:
                removed += count
                if old == bit:
                    _exhaust(map(where.pop, keys if count == most else keys[index : index + count]))
            else:
                gone, dead = self._unset(segment, low, low + count, bit)
                removed += gone
                elsewhere += dead
            self._settle(number, segment, place, bit)
            index += count
        if elsewhere:
            removed += self.remove(place, [key for key in elsewhere if key in where])
        return removed

    def clear(self, place: int) -> int:
        """See ``IndexBackend``."""
        bit = 1 << place
        removed = 0
        for number in list(self._held_by(place)):
            segment = self._segments[number]
            removed += self._unset(segment, 0, len(segment.keys), bit)[0]
            self._settle(number, segment, place, bit)
        return removed

    # -- questions --------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[int], through_holes: bool = False) -> Rows:
        """See ``IndexBackend``."""
        find, segments = self._where.get, self._segments
        rows: Rows = []
        block, count, last = 0, len(keys), 0
        while block < count:
            loc = find(keys[block])
            if loc is None:
                if not through_holes:
                    break
                where = self._where
                block = next((i for i in range(block + 1, count) if keys[i] in where), count)
                if block == count:
                    break
                rows.append((block, 0))
                last = 0
                continue
            segment = segments[loc >> _BITS]
            segment.touched = True
            off = loc & _OFFSET
            mine, stops, masks = segment.keys, segment.stops, segment.masks
            run = bisect_right(stops, off) if off else 0
            shift = block - off
            end = len(mine)
            if end > count - shift:
                end = count - shift
            # Run by run, since two texts mostly part where rows change: two comparisons each, and no search.
            while mask := masks[run]:
                stop = stops[run]
                if stop > end:
                    stop = end
                if mine[stop - 1] != keys[stop - 1 + shift]:
                    stop = end = segment.part(off, keys, block, stop)
                block = stop + shift
                if mask == last:
                    rows[-1] = (block, mask)
                else:
                    last = mask
                    rows.append((block, mask))
                if stop == end or mine[stop] != keys[block]:
                    break
                off = stop
                run += 1
        return rows

    def holds(self, place: int, key: int) -> bool:
        """See ``IndexBackend``."""
        loc = self._where.get(key)
        return loc is not None and self._segments[loc >> _BITS].live(loc & _OFFSET)[1] >> place & 1 == 1

    def held(self, place: int) -> Iterator[Sequence[int]]:
        """See ``IndexBackend``."""
        for number in sorted(self._held_by(place)):
            segment = self._segments[number]
            for holds, group in groupby(segment.runs(), lambda run: run[2] >> place & 1):
                if holds:
                    runs = list(group)
                    yield segment.keys[runs[0][0] : runs[-1][1]].tolist()

    def segments_of(self, place: int) -> list[int]:
        """Return the segments in which ``place`` holds something now: for ``count_held``, a part at a time."""
        return list(self._held_by(place))

    def count_held(self, place: int, segments: Iterable[int]) -> int:
        """Return the number of blocks that ``place`` holds in ``segments``, ignoring segments that are gone."""
        count = 0
        for number in segments:
            segment = self._segments.get(number)
            if segment is not None:
                for start, stop, mask in segment.runs():
                    if mask >> place & 1:
                        count += stop - start
        return count

    def holding(self) -> list[int]:
        """Return the places that hold something."""
        return [place for place, numbers in enumerate(self._held) if numbers]

    def usage(self) -> Usage:
        """See ``IndexBackend``."""
        return Usage(
            blocks=len(self._where),
            rows=sum(len(segment.masks) - segment.masks.count(0) for segment in self._segments.values()),
            bytes=self._bytes(),
            evicted=self._evicted,
        )

    def check_integrity(self) -> None:
        """See ``IndexBackend``."""
        living = 0
        for number, segment in self._segments.items():
            assert segment.base == number << _BITS, f"segment {number} is elsewhere"
            assert 0 < len(segment.keys) <= _MOST, f"segment {number} is out of shape"
            assert segment.stops == sorted(set(segment.stops)) and segment.stops[-1] == len(segment.keys)
            assert all(a != b for a, b in pairwise(segment.masks)), "equal rows side by side"
            assert segment.masks[-1], f"segment {number} has a dead end"
            alive = [off for start, stop, mask in segment.runs() if mask for off in range(start, stop)]
            living += len(alive)
            assert all(self._where.get(segment.keys[off]) == segment.base + off for off in alive), "a key is lost"
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

    def _unset(self, segment: Segment, low: int, high: int, bit: int) -> tuple[int, list[int]]:
        """Clear ``bit`` in the rows; returns how many had it, and the keys of dead runs, which may live elsewhere."""
        removed, dead = 0, array("Q")
        for start, stop, was in segment.paint(low, high, 0, bit):
            if not was:
                dead += segment.keys[start:stop]
            elif was & bit:
                removed += stop - start
                if was == bit:
                    _exhaust(map(self._where.pop, segment.keys[start:stop]))
        return removed, dead.tolist()

    def _store_rest(self, held: set[int], bit: int, keys: list[int], index: int) -> list[int]:
        """Store ``keys`` from ``index`` on, whatever is known of them; returns those that were held."""
        where, segments = self._where, self._segments
        repeated: list[int] = []
        count = len(keys)
        while index < count:
            loc = where.get(keys[index])
            if loc is None:
                index += self._store_fresh(held, bit, keys[index:], keys[index - 1])
                continue
            number = loc >> _BITS
            segment = segments[number]
            off = loc & _OFFSET
            end = off + segment.agree(off, keys, index)
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
            index += stop - off
        return repeated

    def _store_fresh(self, held: set[int], bit: int, fresh: list[int], parent: int | None) -> int:
        """Store ``fresh``, whose first isn't held yet, up to the next that is; returns how many that are."""
        loc = self._where.get(parent) if parent is not None else None
        if loc is not None:
            number = loc >> _BITS
            segment = self._segments[number]
            off = (loc & _OFFSET) + 1
            if off < len(segment.keys):
                if segment.keys[off] == fresh[0]:
                    return self._store_on_dead(held, bit, segment, off, fresh)
            elif off + len(fresh) <= _MOST:
                segment.keys.fromlist(fresh)  # raises, before anything is changed, for what is no key
                count = self._enter(segment, off, fresh)
                segment.grow(off + count, bit)
                held.add(number)
                return count
        if len(fresh) > _MOST:
            fresh = fresh[:_MOST]
        packed = array("Q", fresh)  # raises as above
        segment = self._open()
        segment.keys = packed
        count = self._enter(segment, 0, fresh)
        segment.grow(count, bit)
        held.add(segment.base >> _BITS)
        return count

    def _enter(self, segment: Segment, off: int, fresh: list[int]) -> int:
        """Make ``fresh``, which ends ``segment`` from ``off`` on, known up to the first key that is known already.

        Cuts off the rest; returns how many are left. One probe per key both asks and tells.
        """
        where, count = self._where, len(fresh)
        start = segment.base + off
        expected = len(where) + count
        _exhaust(map(where.setdefault, fresh, range(start, start + count)))
        if len(where) != expected:
            # One of them is held already, or listed twice; either way it is found elsewhere than expected.
            rest = zip(fresh, range(start, start + count), strict=True)
            count = next(index for index, (key, new) in enumerate(rest) if where[key] != new)
            for key, new in rest:
                if where.get(key) == new:
                    del where[key]
            del segment.keys[off + count :]
        return count

    def _store_on_dead(self, held: set[int], bit: int, segment: Segment, off: int, fresh: list[int]) -> int:
        """Store ``fresh`` where it was before it died, as far as that goes and it isn't held elsewhere."""
        where = self._where
        stop = min(segment.live(off)[0], off + segment.agree(off, fresh, 0))
        keys = segment.keys[off:stop]
        if not where.keys().isdisjoint(keys):
            keys = keys[: next(index for index, key in enumerate(keys) if key in where)]
            stop = off + len(keys)
        segment.paint(off, stop, bit, 0)
        where.update(zip(keys, range(segment.base + off, segment.base + stop), strict=True))
        held.add(segment.base >> _BITS)
        return stop - off

    def _revive(self, segment: Segment, low: int, high: int) -> bool:
        """Index the keys of a dead run here again, unless they live elsewhere; returns true if it did."""
        keys = segment.keys[low:high]
        free = self._where.keys().isdisjoint(keys)
        if free:
            self._where.update(zip(keys, range(segment.base + low, segment.base + high), strict=True))
        return free

    def _open(self) -> Segment:
        if self._free:
            number = self._free.pop()
        else:
            number, self._next = self._next, self._next + 1
        segment = self._segments[number] = Segment(number << _BITS)
        return segment

    def _settle(self, number: int, segment: Segment, place: int, bit: int) -> None:
        """Tidy ``segment`` after ``place`` removed something from it."""
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
        """Evict segments until the budget is kept; a segment that was used gets a second chance."""
        assert self.budget is not None
        segments = self._segments
        while self._bytes() > self.budget:
            number = next(iter(segments))
            segment = segments.pop(number)
            if segment.touched:
                segment.touched = False
                segments[number] = segment
            else:
                self._forget(number, segment)

    def _forget(self, number: int, segment: Segment) -> None:
        union = 0
        for start, stop, mask in segment.runs():
            if mask:
                union |= mask
                keys = segment.keys[start:stop].tolist()
                _exhaust(map(self._where.pop, keys))
                self._evicted += stop - start
                if self._forgotten is not None:
                    for place in bits(mask):
                        self._forgotten(place, keys)
        for place in bits(union):
            self._held[place].discard(number)
        self._free.append(number)
