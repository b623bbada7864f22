"""Durations of passes by a pass table: straight lines for decode steps, interpolation for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from kvyard.engine.timing.host import NO_HOST, Host
from kvyard.engine.timing.interpolation import Grid, Line, place, place_before
from kvyard.engine.timing.model import SHORT, Durations, Times, scaled, scaled_many
from kvyard.engine.timing.pass_table import Curve, PassTable, Plane
from kvyard.engine.timing.roofline import padded

NS_PER_US = 1e3


class TableModel:
    """``host`` adds its part to each pass. ``mixed_decode`` stands in where passes with both were not measured.

    All parts are nanoseconds, rounded once a pass is put together.
    """

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
        self._host_ns = host.step_us * NS_PER_US
        self._host_sequence_ns = host.sequence_us * NS_PER_US
        self._overlap = host.overlap
        self._exposed_ns = host.exposed_us * NS_PER_US if host.overlap else self._host_ns
        self._exposed_sequence_ns = host.exposed_sequence_us * NS_PER_US if host.overlap else self._host_sequence_ns
        self._launch_ns = host.launch_us * NS_PER_US
        self._mixed = mixed_decode
        self._prompt_ratio, self._decode_ratio = speedup, speedup * decode_speedup
        self._graph_tokens = table.graph_tokens
        self._tokens, self._sequences = _line(table.tokens), _line(table.sequences)
        self._skew = table.skew
        self._experts = _line(table.experts) if table.experts is not None else None
        self._prompt = _grid(table.prompt)
        self._decode = table.decode
        self._steps: dict[int, _Steps] = {}
        self._together = _MixedAttention(table.together) if table.together else None

    # -- the two verbs ----------------------------------------------------------------------------------------------

    def pass_ns(self, prefills: Sequence[tuple[int, int]], decode_batch: int, decode_context: int, longest: int) -> int:
        # Prompts' attention one after the other, their tokens, and pairs of a new token with a past one.
        alone, new, pairs, prompts = 0.0, 0, 0, 0
        for fresh, past in prefills:
            if fresh:
                ns = self._prompt.value(fresh, past)
                if ns > 0.0:
                    alone += ns
                new += fresh
                pairs += fresh * past
                prompts += 1
        if not prompts:
            if not decode_batch:
                return 0
            return scaled(round(self._of(decode_batch).step(decode_context, longest)), self._decode_ratio)
        work = self._base(decode_batch + new, decode_batch + prompts)
        if not decode_batch:
            work += alone
        elif self._together is None:
            work += alone + self._mixed * self._of(decode_batch).attention(decode_context, longest)
        else:
            # Measured with one prompt; several are what they take one after the other, and slow decoding down as one would.
            behind = pairs / new
            both = self._together.value(new, behind, decode_batch, decode_context / decode_batch)
            whole = self._prompt.value(new, behind) if prompts > 1 else alone
            skewed = self._of(decode_batch).skewed(decode_context, longest)
            work += both * (alone / whole if whole else 1.0) + skewed
        if work < self._launch_ns:
            work = self._launch_ns
        work += self._exposed(decode_batch + prompts)
        host = self._hidden(decode_batch + prompts)
        return scaled(round(work if work > host else host), self._prompt_ratio)

    def decode_ns(self, batch: int, context: int, passes: int, longest: int) -> Durations:
        if not batch:
            return np.zeros(passes, dtype=np.int64)
        steps, ratio = self._of(batch), self._decode_ratio
        if passes > SHORT:
            return scaled_many(np.rint(steps.steps(context, passes, longest)), ratio)
        spent = [scaled(round(steps.step(context + done * batch, longest + done)), ratio) for done in range(passes)]
        return np.array(spent, dtype=np.int64)

    def uneven_ns(self, tokens: int, of_all: Sequence[int]) -> int:
        if self._experts is None:
            return 0
        most = max(of_all)
        # As CUDA graphs all ranks' passes have the largest one's size; launched one by one, kernels take what there is.
        total = (
            len(of_all) * self._size(most) if most <= self._graph_tokens else sum(max(1, of_rank) for of_rank in of_all)
        )
        ns = self._experts.value(total) - self._experts.value(len(of_all) * self._size(tokens))
        return round(ns / self._prompt_ratio)

    # -- parts, in nanoseconds --------------------------------------------------------------------------------------

    def _base(self, tokens: int, sequences: int) -> float:
        return self._tokens.value(self._size(tokens)) + self._sequences.value(sequences)

    def _size(self, tokens: int) -> int:
        """Return tokens that are computed where ``tokens`` are wanted."""
        return padded(tokens) if tokens <= self._graph_tokens else tokens

    def _exposed(self, sequences: int) -> float:
        """Return what a pass of ``sequences`` takes beyond its kernels."""
        return self._exposed_ns + self._exposed_sequence_ns * sequences

    def _hidden(self, sequences: int) -> float:
        """Return the least time of a pass of ``sequences``: the host's, which works while kernels do."""
        return self._host_ns + self._host_sequence_ns * sequences if self._overlap else 0.0

    def _of(self, batch: int) -> _Steps:
        steps = self._steps.get(batch)
        if steps is None:
            curve = self._decode.row(batch)
            flat = self._base(batch, batch) + self._exposed(batch)
            steps = self._steps[batch] = _Steps(curve, batch, flat, self._hidden(batch), self._skew.value(batch))
        return steps


FAR = 1 << 40
"""Tokens beyond any context."""


class _Steps:
    """Decode steps of one batch size by their summed context, in nanoseconds: straight lines between measured points.

    Attention is flat before its first point, and beyond its last goes on as between the last two. ``skew`` of the way to the
    longest context counts too.
    """

    __slots__ = ("_attention", "_batch", "_least", "_skew", "_slopes", "_starts", "_whole")

    def __init__(self, curve: Curve, batch: int, flat: float, least: float, skew: float) -> None:
        points = [*curve.at, FAR]
        ns = [us * NS_PER_US for us in (*curve.us, curve.value(FAR))]
        slopes, attention = [0.0], [ns[0]]
        for low in range(len(points) - 1):
            slope = (ns[low + 1] - ns[low]) / (points[low + 1] - points[low])
            slopes.append(slope / batch)
            attention.append(ns[low] - slope * points[low])
        self._starts = tuple([-1.0, *[float(point * batch) for point in points]])
        self._slopes = tuple(slopes)
        self._attention = tuple(attention)
        self._whole = tuple([flat + value for value in attention])
        self._batch, self._least, self._skew = batch, least, skew

    def attention(self, context: int, longest: int) -> float:
        line = place(self._starts, context)
        return self._attention[line] + self._slopes[line] * context + self.skewed(context, longest)

    def skewed(self, context: int, longest: int) -> float:
        """Return the part of ``attention`` that the longest context adds."""
        top = longest * self._batch
        if top <= context or not self._skew:
            return 0.0
        more = self._step(top) - self._step(context)
        return self._skew * more if more > 0.0 else 0.0

    def step(self, context: int, longest: int) -> float:
        """Return the time of a whole pass."""
        ns = self._step(context) + self.skewed(context, longest)
        return ns if ns > self._least else self._least

    def steps(self, context: int, passes: int, longest: int) -> Times:
        """Return ``step`` of passes whose contexts, and the longest, grow by one token each."""
        ns = self._many(context, passes)
        top = longest * self._batch
        if top > context and self._skew:
            ns += self._skew * np.maximum(self._many(top, passes) - ns, 0.0)
        return np.maximum(ns, self._least) if self._least else ns

    def _step(self, context: int) -> float:
        line = place(self._starts, context)
        return self._whole[line] + self._slopes[line] * context

    def _many(self, context: int, passes: int) -> Times:
        """Return ``_step`` of contexts that grow by ``batch`` tokens. Mostly they are on one line."""
        end = context + passes * self._batch
        line = place(self._starts, context)
        if end - self._batch >= self._starts[line + 1]:
            return np.array([self._step(tokens) for tokens in range(context, end, self._batch)])
        contexts: Times = np.arange(context, end, self._batch, dtype=np.float64)
        contexts *= self._slopes[line]
        contexts += self._whole[line]
        return contexts


class _MixedAttention:
    """Attention of passes with a prompt and decode steps, linear between measured (new, past), in nanoseconds."""

    def __init__(self, planes: Sequence[tuple[int, int, Plane]]) -> None:
        grids: dict[int, dict[int, Grid]] = {}
        for new, past, plane in sorted(planes, key=lambda one: one[:2]):
            grids.setdefault(new, {})[past] = _grid(plane)
        self._new = tuple([float(new) for new in grids])
        self._past = [tuple([float(past) for past in row]) for row in grids.values()]
        self._grids = [list(row.values()) for row in grids.values()]

    def value(self, new: int, past: float, batch: int, context: float) -> float:
        low = place_before(self._new, new)
        share = _share(self._new, low, new)
        if share == 0.0:
            return self._along_past(low, past, batch, context)
        near = self._along_past(low, past, batch, context)
        return (1.0 - share) * near + share * self._along_past(low + 1, past, batch, context)

    def _along_past(self, row: int, past: float, batch: int, context: float) -> float:
        axis, grids = self._past[row], self._grids[row]
        low = place_before(axis, past)
        share = _share(axis, low, past)
        near = grids[low].value(batch, context)
        return near if share == 0.0 else (1.0 - share) * near + share * grids[low + 1].value(batch, context)


def _line(curve: Curve) -> Line:
    return Line(curve.at, tuple([us * NS_PER_US for us in curve.us]))


def _grid(plane: Plane) -> Grid:
    return Grid(plane.rows, plane.at, tuple([tuple([us * NS_PER_US for us in row]) for row in plane.us]))


def _share(axis: tuple[float, ...], low: int, x: float) -> float:
    """Return the share of the way from the point at ``low`` to the next, more than 1 beyond the last and 0 before the first."""
    if len(axis) == 1 or x <= axis[low]:
        return 0.0
    return (x - axis[low]) / (axis[low + 1] - axis[low])
