"""Seen: the workers that have ever computed each part of a text. It distinguishes an evicted prefix from one that no worker
had.

It is kept for a whole replay, so it must be small: texts are lines of ids that branch off each other, and their workers are
kept by runs. An id names its whole prefix, so a worker that has computed an id has computed all ids before it.

All lines lie in a few long columns: a line takes 8 bytes an id and some 150 besides. As objects they took 500.
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import TypeAlias

from kvyard.engine.job import Job
from kvyard.hashing import TraceChain
from kvyard.hashing.prefix_tree import paint, parting

Ids: TypeAlias = "array[int] | list[int]"

_Path: TypeAlias = list[tuple[int, int, int]]
"""The lines on a text's way, by number, each with the positions of it that are the text's."""


class _Lines:
    """Lines of ids, found by their first, and the workers of each run of them, as bits."""

    __slots__ = ("_firsts", "bases", "ids", "masks", "offsets", "split")

    def __init__(self) -> None:
        self.ids: Ids = array("Q")
        """Ids of all lines, one after the other."""
        self.offsets = array("q", [0])
        """Start of each line there, and of the next one to come."""
        self.bases = array("q")
        """By line, the position of its first id in its text."""
        self.masks: list[int] = []
        """By line, the workers of all of it, unless it is in ``split``. Objects that are shared, as most have one worker."""
        self.split: dict[int, tuple[list[int], list[int]]] = {}
        """For lines of which workers have computed different parts: the positions where runs end, and the workers of each."""
        self._firsts: dict[int, int] = {}
        """Lines by their first id."""

    def find(self, name: int) -> int:
        """Return the line whose first id is ``name``, -1 if there is none."""
        return self._firsts.get(name, -1)

    def add(self, base: int, ids: Sequence[int], workers: int) -> None:
        """Add a line, in place of another with the same first id."""
        try:
            self.ids.extend(array("Q", ids) if isinstance(self.ids, array) else ids)
        except OverflowError:
            self.ids = [*self.ids, *ids]
        line = len(self.bases)
        self._firsts[ids[0]] = line
        self.offsets.append(len(self.ids))
        self.bases.append(base)
        self.masks.append(workers)

    def stop(self, line: int) -> int:
        """Return the position behind its last id."""
        return self.bases[line] + self.offsets[line + 1] - self.offsets[line]

    def runs(self, line: int) -> tuple[list[int], list[int]]:
        """Return the ends of runs, and the workers of each."""
        runs = self.split.get(line)
        return ([self.stop(line)], [self.masks[line]]) if runs is None else runs

    def workers(self, line: int, position: int) -> int:
        """Return the workers that have computed the id at a position."""
        runs = self.split.get(line)
        if runs is None:
            return self.masks[line]
        stops, masks = runs
        return masks[bisect_right(stops, position)]

    def upto(self, line: int, worker: int, low: int, high: int) -> int:
        """Return the position up to which a worker, given by its bit, has computed it from ``low`` on, at most ``high``."""
        runs = self.split.get(line)
        if runs is None:
            return high if self.masks[line] & worker else low
        stops, masks = runs
        run = bisect_right(stops, low)
        while low < high and masks[run] & worker:
            low = stops[run]
            run += 1
        return low if low < high else high

    def note(self, line: int, low: int, high: int, worker: int) -> None:
        """Note that a worker, given by its bit, has computed positions ``low`` to ``high``."""
        stops, masks = self.runs(line)
        paint(stops, masks, self.bases[line], low, high, worker, 0)
        if len(stops) > 1:
            self.split[line] = (stops, masks)
        else:
            self.split.pop(line, None)
            self.masks[line] = masks[0]


class Seen:
    """The parts of prompts that workers have computed, by ids of a trace."""

    def __init__(self) -> None:
        self._lines = _Lines()
        self._bits: list[int] = []
        """By worker: one object each, since most lines have one worker, and thousands of workers are large numbers."""
        self._off: dict[int, int] = {}
        """By id, workers that have computed it and were switched off since."""
        self._sessions: dict[str, dict[int, int]] = {}
        """By session, the lines that its prompts lie on and how far: the position behind the last id."""

    def switched_off(self, worker: int) -> None:
        """Remove ``worker`` and everything it had."""
        bit, off, lines = self._bit(worker), self._off, self._lines
        for line in range(len(lines.bases)):
            start = lines.bases[line]
            shift = lines.offsets[line] - start
            for stop, workers in zip(*lines.runs(line)):
                if workers & bit:
                    for name in lines.ids[start + shift : stop + shift]:
                        off[name] = off.get(name, 0) | bit
                start = stop

    def gone(self, job: Job, cached: int, worker: int) -> int:
        """Return the tokens of ``job`` behind the ``cached`` ones that only workers had computed which were stopped since.
        Then records that ``worker`` has them.
        """
        chain, off = job.chain, self._off
        if not off or not isinstance(chain, TraceChain):
            return 0
        keys = chain.trace
        ids, size, tokens = keys.ids, keys.id_block_size, 0
        path = self._along(ids)
        for index in range(cached // size, len(ids)):
            workers, left = self._at(path, index), off.get(ids[index], 0)
            if workers and not workers & ~left:
                tokens += min((index + 1) * size, keys.num_prompt_tokens) - max(cached, index * size)
        bit = self._bit(worker)
        for name in ids:
            if off.get(name, 0) & bit:
                off[name] &= ~bit
        return max(0, tokens)

    def reason(
        self, job: Job, cached: int, worker: int, block_size: int, session: str | None = None
    ) -> tuple[str, int, int, int]:
        """Return why ``worker`` found only ``cached`` tokens of ``job``; how many behind them it had computed before, and how
        many behind those another had; and how many tokens, from its first on, earlier requests of ``session`` had. Then notes
        that it has computed all of it.
        """
        chain = job.chain
        if not isinstance(chain, TraceChain) or not chain.trace.ids:
            return "unknown", 0, 0, -1
        keys = chain.trace
        ids, size, length = keys.ids, keys.id_block_size, keys.num_prompt_tokens
        bit = self._bit(worker)
        path = self._along(ids)
        anyone = path[-1][2] if path else 0
        mine = 0
        for line, low, high in path:
            mine = self._lines.upto(line, bit, low, high)
            if mine < high:
                break
        lost = elsewhere = 0
        if cached + block_size >= length:
            why = "none" if cached + block_size == length else "partial_block"
        else:
            # A block belongs to the id of its last token.
            had = self._at(path, (cached + block_size - 1) // size)
            why = "evicted" if had & bit else "other_worker" if had else "never_seen"
            if had:
                start = cached // size
                stop = max(start, mine) if had & bit else start
                lost = max(0, min(stop * size, length) - cached)
                elsewhere = max(0, min(max(stop, anyone) * size, length) - cached - lost)
        own = 0
        if session is not None:
            own = min(self._own(session, path, anyone, len(ids)) * size, length)
        self._note(ids, path, mine, anyone, bit)
        return why, lost, elsewhere, own

    def _own(self, session: str, path: _Path, anyone: int, count: int) -> int:
        """Return the number of ids on ``path`` that earlier prompts of ``session`` had. Then records that it has all
        ``count`` ids of the text, of which some worker had ``anyone`` before.
        """
        lines = self._sessions.get(session)
        if lines is None:
            lines = self._sessions[session] = {}
        own = 0
        index = 0
        while index < len(path):
            line, low, high = path[index]
            upto = lines.get(line, 0)
            if upto > low:
                own = upto if upto < high else high
            if upto < high:
                break
            index += 1
        while index < len(path):
            line, _, high = path[index]
            if lines.get(line, 0) < high:
                lines[line] = high
            index += 1
        if anyone < count:
            lines[len(self._lines.bases)] = count  # the line that is about to be added
        return own

    def _note(self, ids: Sequence[int], path: _Path, mine: int, anyone: int, bit: int) -> None:
        """The worker of ``bit``, which had the first ``mine`` ids of a text, has all; some worker had ``anyone`` of them."""
        for line, low, high in path:
            if high > mine:
                self._lines.note(line, low if low > mine else mine, high, bit)
        if anyone < len(ids):
            self._lines.add(anyone, ids[anyone:], bit)

    def _along(self, ids: Sequence[int]) -> _Path:
        lines = self._lines
        path: _Path = []
        index, count = 0, len(ids)
        while index < count:
            line = lines.find(ids[index])
            if line < 0 or lines.bases[line] != index:
                break
            stop = lines.stop(line)
            end = stop if stop < count else count
            shift = lines.offsets[line] - index
            if lines.ids[end - 1 + shift] != ids[end - 1]:
                end = parting(lines.ids, ids, index, end - 1, -shift)
            path.append((line, index, end))
            index = end
        return path

    def _bit(self, worker: int) -> int:
        bits = self._bits
        while len(bits) <= worker:
            bits.append(1 << len(bits))
        return bits[worker]

    def _at(self, path: _Path, position: int) -> int:
        """Return the workers that have computed the id at a position."""
        for line, _, high in path:
            if position < high:
                return self._lines.workers(line, position)
        return 0
