"""The model of ``polynomial``, apart from its config so that it can be compiled.

The mocker's quirks are kept, because results are compared with it: prefill is charged for the batch size times the difference
of two means that are whole numbers; decoding depends on nothing but the share of the cache that the batch's contexts fill;
both parts are rounded to nanoseconds, then divided by the speed-up and rounded again, and only then added.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar, Final

import numpy as np

from kvyard.engine.timing.model import NS_PER_MS, Durations, Times, scaled, scaled_many
from kvyard.errors import KvyardError

# Milliseconds by new tokens, and by the share of the cache in use. The constants are the mocker's, a fit to one H200.
PREFILL = (4.209989e-7, 1.518344e-2, 16.50142)
DECODE = (-25.74, 54.01, 5.74)

_PAGE: Final = 1 << 14
"""Contexts whose steps are worked out in one go."""

_MOST: Final = 1 << 26
"""Contexts that are kept: caches of more tokens are no card's."""


class DecodeSteps:
    """Duration of a decode pass by its context, for caches of one size: computed once, on demand.

    A plan's passes have contexts at equal distances, so their durations are a slice. It keeps 8 bytes per token of the cache,
    of pages that were asked for.
    """

    def __init__(self, capacity: float, ratio: float) -> None:
        self._capacity = capacity
        self._ratio = ratio
        self._contexts = min(int(capacity) + 1, _MOST)
        # Memory that isn't written to is not taken yet.
        self._steps: Durations = np.empty(self._contexts, dtype=np.int64)
        self._shown: Durations = self._steps.view()
        self._shown.flags.writeable = False  # it is handed out in slices
        self._known = bytearray(self._contexts // _PAGE + 1)
        self._full: Durations = np.zeros(0, dtype=np.int64)
        """Passes of a full cache, which all take as long."""

    def of(self, context: int, batch: int, passes: int) -> Durations:
        """Return the durations of ``passes`` passes, whose first has ``context``, not to be changed."""
        end = context + batch * passes
        last = end - batch
        if last >= self._contexts:
            if context >= self._capacity:
                return self._of_full_cache(passes)
            return self._work_out(np.arange(context, end, batch, dtype=np.float64))
        page = context // _PAGE
        while page <= last // _PAGE:
            if not self._known[page]:
                start, stop = page * _PAGE, min((page + 1) * _PAGE, self._contexts)
                self._steps[start:stop] = self._work_out(np.arange(start, stop, dtype=np.float64))
                self._known[page] = 1
            page += 1
        return self._shown[context:end:batch]

    def _of_full_cache(self, passes: int) -> Durations:
        if len(self._full) < passes:
            self._full = np.repeat(self._work_out(np.array([self._capacity])), 2 * passes)
            self._full.flags.writeable = False
        return self._full[:passes]

    def _work_out(self, contexts: Times) -> Durations:
        # Token counts are exact in floats.
        a, b, c = DECODE
        used = np.minimum(contexts / self._capacity, 1.0)
        return scaled_many(np.rint((a * used * used + b * used + c) * NS_PER_MS), self._ratio)


@lru_cache(maxsize=4)
def decode_steps(capacity: float, ratio: float) -> DecodeSteps:
    """Return the steps, shared by all workers of a kind."""
    return DecodeSteps(capacity, ratio)


class PolynomialModel:
    """Needs the capacity of the engine's cache in tokens: decoding slows down as it fills."""

    needs_longest: ClassVar[bool] = False
    __slots__ = ("_capacity", "_decode_ratio", "_prefill_ratio", "_steps")

    def __init__(self, capacity_tokens: int, prefill_ratio: float, decode_ratio: float) -> None:
        if capacity_tokens < 1:
            raise KvyardError(f"timing: polynomial needs the cache's capacity in tokens, got {capacity_tokens}")
        self._capacity = float(capacity_tokens)
        self._prefill_ratio = prefill_ratio
        self._decode_ratio = decode_ratio
        self._steps = decode_steps(self._capacity, decode_ratio)

    def pass_ns(self, prefills: Sequence[tuple[int, int]], decode_batch: int, decode_context: int, longest: int) -> int:
        ns = 0
        if prefills:
            n = charged_tokens(prefills)
            if n:
                a, b, c = PREFILL
                ns = round((a * n * n + b * n + c) * NS_PER_MS)
                if self._prefill_ratio != 1.0:
                    ns = scaled(ns, self._prefill_ratio)
        if decode_batch:
            ns += self._step(decode_context)
        return ns

    def decode_ns(self, batch: int, context: int, passes: int, longest: int) -> Durations:
        if not batch:
            return np.zeros(passes, dtype=np.int64)
        return self._steps.of(context, batch, passes)

    def _step(self, context: int) -> int:
        # The mocker's floor of 1 ms is left out: the parabola never gets there for shares from 0 to 1.
        a, b, c = DECODE
        used = context / self._capacity
        used = min(used, 1.0)
        ns = round((a * used * used + b * used + c) * NS_PER_MS)
        return ns if self._decode_ratio == 1.0 else scaled(ns, self._decode_ratio)


def charged_tokens(prefills: Sequence[tuple[int, int]]) -> int:
    """Return the tokens that a batch of (new, past) prefills is charged for: batch * (mean length - mean past), means cut to
    ints.
    """
    if len(prefills) == 1:
        return prefills[0][0]
    new = past = batch = 0
    for fresh, cached in prefills:
        if fresh:
            new += fresh
            past += cached
            batch += 1
    return batch * ((new + past) // batch - past // batch) if batch else 0
