"""Durations of passes by a pass table: lookups in lists, and two interpolations for attention."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from kvyard.engine.timing.host import NO_HOST, Host
from kvyard.engine.timing.interpolation import along
from kvyard.engine.timing.model import SHORT, Durations, Times, contexts, scaled, scaled_many
from kvyard.engine.timing.pass_table import Curve, PassTable, Plane
from kvyard.engine.timing.roofline import padded

REMEMBERED = 1 << 14
"""Shapes whose time is kept."""


class TableModel:
    """``host`` adds its part to each pass. ``mixed_decode`` stands in where passes with both were not measured."""

    needs_longest: ClassVar[bool] = True

    def __init__(
        self,
        table: PassTable,
        *,
        host: Host = NO_HOST,
        mixed_decode: float = 1.0,
        speedup: float = 1.0,
        decode_speedup: float = 1.0,
    ) -> None:
        self._table = table
        self._host = host
        self._mixed = mixed_decode
        self._prompt_ratio, self._decode_ratio = speedup, speedup * decode_speedup
        self._bases: dict[tuple[int, int], float] = {}
        self._rows: dict[int, _Row] = {}
        self._prompts: dict[tuple[int, int], float] = {}
        self._together = _MixedAttention(table.together) if table.together else None

    # -- the two verbs ----------------------------------------------------------------------------------------------

    def pass_ns(self, prefills: Sequence[tuple[int, int]], decode_batch: int, decode_context: int, longest: int) -> int:
        # Prompts' attention one after the other, their tokens, and pairs of a new token with a past one.
        alone, new, pairs, prompts = 0.0, 0, 0, 0
        for fresh, past in prefills:
            if fresh:
                alone += self._prompt(fresh, past)
                new += fresh
                pairs += fresh * past
                prompts += 1
        tokens, sequences = decode_batch + new, decode_batch + prompts
        if not tokens:
            return 0
        base, joined = self._base(tokens, sequences), self._host.joined_prompts
        decode = 0.0
        if decode_batch:
            decode = self._row(decode_batch).step(decode_context / decode_batch, longest)
        if not prompts:
            return scaled(round(self._host.joined(sequences, base + decode) * 1e3), self._decode_ratio)
        if not decode_batch:
            return scaled(round(joined(sequences, base + alone) * 1e3), self._prompt_ratio)
        if self._together is None:
            work = base + alone + decode * self._mixed
            return scaled(round(joined(sequences, work) * 1e3), self._prompt_ratio)
        # Measured with one prompt; several are what they take one after the other, and slow decoding down as one would.
        behind = pairs / new
        mean = decode_context / decode_batch
        both = self._together.value(new, behind, decode_batch, mean)
        whole = self._table.prompt.value(new, behind) if prompts > 1 else alone
        skewed = decode - self._row(decode_batch).mean(mean)
        work = base + both * (alone / whole if whole else 1.0) + skewed
        return scaled(round(joined(sequences, work) * 1e3), self._prompt_ratio)

    def decode_ns(self, batch: int, context: int, passes: int, longest: int) -> Durations:
        if not batch:
            return np.zeros(passes, dtype=np.int64)
        base, row, ratio = self._base(batch, batch), self._row(batch), self._decode_ratio
        if passes > SHORT:
            steps = row.steps(contexts(batch, context, passes) / batch, longest)
            return scaled_many(np.rint(self._host.joined_many(batch, base + steps) * 1e3), ratio)
        step, joined = row.step, self._host.joined
        spent = [
            scaled(round(joined(batch, base + step((context + done * batch) / batch, longest + done)) * 1e3), ratio)
            for done in range(passes)
        ]
        return np.array(spent, dtype=np.int64)

    def uneven_ns(self, tokens: int, of_all: Sequence[int]) -> int:
        experts = self._table.experts
        if experts is None:
            return 0
        most = max(of_all)
        # As CUDA graphs all ranks' passes have the largest one's size; launched one by one, kernels take what there is.
        total = (
            len(of_all) * self._size(most)
            if most <= self._table.graph_tokens
            else sum(max(1, of_rank) for of_rank in of_all)
        )
        us = experts.value(total) - experts.value(len(of_all) * self._size(tokens))
        return round(us * 1e3 / self._prompt_ratio)

    # -- parts, in microseconds -------------------------------------------------------------------------------------

    def _base(self, tokens: int, sequences: int) -> float:
        base_us = self._bases.get((tokens, sequences))
        if base_us is None:
            _bound(self._bases)
            table = self._table
            base_us = table.tokens.value(self._size(tokens)) + table.sequences.value(sequences)
            self._bases[tokens, sequences] = base_us
        return base_us

    def _size(self, tokens: int) -> int:
        """Return tokens that are computed where ``tokens`` are wanted."""
        return padded(tokens) if tokens <= self._table.graph_tokens else tokens

    def _row(self, batch: int) -> _Row:
        cached = self._rows.get(batch)
        if cached is None:
            table = self._table
            cached = self._rows[batch] = _Row(table.decode.row(batch), table.skew.value(batch))
        return cached

    def _prompt(self, new: int, past: int) -> float:
        us = self._prompts.get((new, past))
        if us is None:
            _bound(self._prompts)
            us = self._prompts[new, past] = max(0.0, self._table.prompt.value(new, past))
        return us


def _bound(memory: dict[tuple[int, int], float]) -> None:
    if len(memory) >= REMEMBERED:
        memory.clear()


FAR = 1 << 40
"""Tokens beyond any context."""


class _Row:
    """Decode attention of one batch size along the mean context, with a way to the longest. Before its first point it is flat,
    and beyond its last it goes on as between the last two.
    """

    __slots__ = ("_at", "_points", "_slopes", "_us", "_values", "skew")

    def __init__(self, curve: Curve, skew: float) -> None:
        self._at = [*curve.at, FAR]
        self._us = [*curve.us, curve.value(FAR)]
        pairs = zip(self._at, self._at[1:], self._us, self._us[1:], strict=False)
        self._slopes = [(y1 - y0) / (x1 - x0) for x0, x1, y0, y1 in pairs]
        self._points = np.array(self._at, dtype=np.float64)
        self._values = np.array(self._us, dtype=np.float64)
        self.skew = skew

    def mean(self, context: float) -> float:
        low = bisect_right(self._at, context) - 1
        return self._us[0] if low < 0 else self._us[low] + (context - self._at[low]) * self._slopes[low]

    def step(self, context: float, longest: int) -> float:
        us = self.mean(context)
        if longest > context and self.skew:
            more = self.mean(longest) - us
            if more > 0:
                us += self.skew * more
        return us

    def steps(self, means: Times, longest: int) -> Times:
        """Like ``step`` for contexts that grow by one each step, the longest from ``longest`` on."""
        us = self._means(means)
        if self.skew and longest > means[0]:
            # Both grow by one each step, so that the longest stays the longer one.
            tops = np.arange(longest, longest + len(means), dtype=np.float64)
            us += self.skew * np.maximum(self._means(tops) - us, 0.0)
        return us

    def _means(self, contexts: Times) -> Times:
        """Interpolate contexts that rise. Mostly they lie between two points."""
        low = bisect_right(self._at, contexts[0]) - 1
        if low >= 0 and contexts[-1] < self._at[low + 1]:
            return (contexts - self._at[low]) * self._slopes[low] + self._us[low]
        return np.interp(contexts, self._points, self._values)


class _Line:
    """Attention of one prompt beside one batch of decode steps, along their mean context."""

    __slots__ = ("_at", "_us")

    def __init__(self, curve: Curve) -> None:
        self._at = curve.at
        self._us = curve.us

    def value(self, context: float) -> float:
        return along(self._at, self._us, context)


class _MixedAttention:
    """Attention of passes with a prompt and decode steps, linear between measured (new, past)."""

    def __init__(self, planes: Sequence[tuple[int, int, Plane]]) -> None:
        self._planes: dict[int, dict[int, Plane]] = {}
        for new, past, plane in sorted(planes, key=lambda one: one[:2]):
            self._planes.setdefault(new, {})[past] = plane
        self._new = list(self._planes)
        self._past = [list(row) for row in self._planes.values()]
        self._lines: dict[tuple[int, int, int], _Line] = {}
        """By the places of new and past tokens on their axes, and decoding requests: batches come again."""

    def value(self, new: int, past: float, batch: int, context: float) -> float:
        low = _before(self._new, new)
        share = _share(self._new, low, new)
        if share == 0.0:
            return self._along_past(0.0, 1.0, low, past, batch, context)
        total = self._along_past(0.0, 1.0 - share, low, past, batch, context)
        return self._along_past(total, share, low + 1, past, batch, context)

    def _along_past(self, total: float, share: float, row: int, past: float, batch: int, context: float) -> float:
        """Add ``share`` of what ``row``'s new tokens take to ``total``."""
        axis = self._past[row]
        low = _before(axis, past)
        part = _share(axis, low, past)
        if part == 0.0:
            return total + share * self._line(row, low, batch).value(context)
        total += share * (1.0 - part) * self._line(row, low, batch).value(context)
        return total + share * part * self._line(row, low + 1, batch).value(context)

    def _line(self, row: int, column: int, batch: int) -> _Line:
        cached = self._lines.get((row, column, batch))
        if cached is None:
            if len(self._lines) >= REMEMBERED:
                self._lines.clear()
            plane = self._planes[self._new[row]][self._past[row][column]]
            cached = self._lines[row, column, batch] = _Line(plane.row(batch))
        return cached


def _before(axis: list[int], x: float) -> int:
    """Return the place of the point before ``x``: never the last one, unless there is no other."""
    low = bisect_right(axis, x) - 1
    last = len(axis) - 2
    if low > last:
        low = last
    return low if low > 0 else 0


def _share(axis: list[int], low: int, x: float) -> float:
    """Return the share of the way from the point at ``low`` to the next, more than 1 beyond the last and 0 before the first."""
    if len(axis) == 1 or x <= axis[low]:
        return 0.0
    return (x - axis[low]) / (axis[low + 1] - axis[low])
