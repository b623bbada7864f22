"""Seen: which workers have ever computed which part of which text. It tells a lost prefix from one that no worker had.

It is kept for as long as a replay runs, so it must be small: texts are lines of ids that branch off each other, and who has
computed them is kept by stretches. An id names all that comes before it, so who has computed one has all before it.
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import TypeAlias

from kvyard.engine.job import Job
from kvyard.hashing import TraceChain
from kvyard.hashing.stretches import paint, parting

Ids: TypeAlias = "array[int] | list[int]"


class _Line:
    """Ids from position ``base`` on, and the workers of each stretch of them, as bits."""

    __slots__ = ("base", "ids", "masks", "stops")

    def __init__(self, base: int, ids: Sequence[int], workers: int) -> None:
        self.base = base
        self.ids = _packed(ids)
        self.stops = [base + len(ids)]
        self.masks = [workers]

    def extend(self, ids: Sequence[int], workers: int) -> None:
        """The text goes on, and ``workers`` have computed that too."""
        more = _packed(ids)
        if type(more) is not type(self.ids):
            self.ids, more = list(self.ids), list(more)
        self.ids.extend(more)
        stop = self.base + len(self.ids)
        if self.masks[-1] == workers:
            self.stops[-1] = stop
        else:
            self.stops.append(stop)
            self.masks.append(workers)

    def upto(self, worker: int, low: int, high: int) -> int:
        """How far from ``low`` on a worker, given by its bit, has computed it, at most to ``high``."""
        run = bisect_right(self.stops, low)
        while low < high and self.masks[run] & worker:
            low = self.stops[run]
            run += 1
        return low if low < high else high


_Path: TypeAlias = list[tuple[_Line, int, int]]
"""The lines on a text's way, each with the positions of it that are the text's."""


class Seen:
    """What workers have computed, by ids of a trace."""

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}
        """By their first id."""
        self._bits: list[int] = []
        """By worker: one object each, since most lines have one worker, and thousands of workers are large numbers."""
        self._off: dict[int, int] = {}
        """By id, workers that have computed it and were switched off since."""

    def switched_off(self, worker: int) -> None:
        """``worker`` is gone, and all that it had."""
        bit, off = self._bit(worker), self._off
        for line in self._lines.values():
            start = line.base
            for stop, workers in zip(line.stops, line.masks):
                if workers & bit:
                    for name in line.ids[start - line.base : stop - line.base]:
                        off[name] = off.get(name, 0) | bit
                start = stop

    def gone(self, job: Job, found: int, worker: int) -> int:
        """How many tokens of ``job`` behind the ``found`` ones only workers had computed that were switched off since. Then
        notes that ``worker`` has them.
        """
        chain, off = job.chain, self._off
        if not off or not isinstance(chain, TraceChain):
            return 0
        keys = chain.trace
        ids, size, tokens = keys.ids, keys.id_block_size, 0
        path = self._along(ids)
        for at in range(found // size, len(ids)):
            workers, left = _at(path, at), off.get(ids[at], 0)
            if workers and not workers & ~left:
                tokens += min((at + 1) * size, keys.num_prompt_tokens) - max(found, at * size)
        bit = self._bit(worker)
        for name in ids:
            if off.get(name, 0) & bit:
                off[name] &= ~bit
        return max(0, tokens)

    def reason(self, job: Job, found: int, worker: int, block_size: int) -> tuple[str, int, int]:
        """Why ``worker`` found only ``found`` tokens of ``job``; how many behind them it had computed before, and how many
        behind those another had. Then notes that it has computed all of it.
        """
        chain = job.chain
        if not isinstance(chain, TraceChain) or not chain.trace.ids:
            return "unknown", 0, 0
        keys = chain.trace
        ids, size, length = keys.ids, keys.id_block_size, keys.num_prompt_tokens
        bit = self._bit(worker)
        path = self._along(ids)
        anyone = path[-1][2] if path else 0
        mine = 0
        for line, low, high in path:
            mine = line.upto(bit, low, high)
            if mine < high:
                break
        lost = elsewhere = 0
        if found + block_size >= length:
            why = "none" if found + block_size == length else "partial_block"
        else:
            # A block belongs to the id of its last token.
            had = _at(path, (found + block_size - 1) // size)
            why = "evicted" if had & bit else "other_worker" if had else "never_seen"
            if had:
                start = found // size
                stop = max(start, mine) if had & bit else start
                lost = max(0, min(stop * size, length) - found)
                elsewhere = max(0, min(max(stop, anyone) * size, length) - found - lost)
        self._note(ids, path, mine, anyone, bit)
        return why, lost, elsewhere

    def _note(self, ids: Sequence[int], path: _Path, mine: int, anyone: int, bit: int) -> None:
        """The worker of ``bit``, which had the first ``mine`` ids of a text, has all; some worker had ``anyone`` of them."""
        for line, low, high in path:
            if high > mine:
                paint(line.stops, line.masks, line.base, low if low > mine else mine, high, bit, 0)
        if anyone < len(ids):
            if path and path[-1][0].stops[-1] == anyone:
                path[-1][0].extend(ids[anyone:], bit)
            else:
                self._lines[ids[anyone]] = _Line(anyone, ids[anyone:], bit)

    def _along(self, ids: Sequence[int]) -> _Path:
        find = self._lines.get
        path: _Path = []
        at, count = 0, len(ids)
        while at < count:
            line = find(ids[at])
            if line is None or line.base != at:
                break
            base, theirs = line.base, line.ids
            stop = line.stops[-1]
            end = stop if stop < count else count
            if theirs[end - 1 - base] != ids[end - 1]:
                end = parting(theirs, ids, at, end - 1, base)
            path.append((line, at, end))
            at = end
        return path

    def _bit(self, worker: int) -> int:
        bits = self._bits
        while len(bits) <= worker:
            bits.append(1 << len(bits))
        return bits[worker]


def _at(path: _Path, at: int) -> int:
    """The workers that have computed the id at a position."""
    for line, _, high in path:
        if at < high:
            return line.masks[bisect_right(line.stops, at)]
    return 0


def _packed(ids: Sequence[int]) -> Ids:
    """In little room, where they are no larger than usual."""
    try:
        return array("q", ids)
    except OverflowError:
        return list(ids)
