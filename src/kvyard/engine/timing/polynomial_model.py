"""The model of ``polynomial``, apart from its config so that it can be compiled.

The mocker's quirks are kept, because results are compared with it: prefill is charged for the batch size times the difference
of two means that are whole numbers; decoding depends on nothing but the share of the cache that the batch's contexts fill;
both parts are rounded to nanoseconds, then divided by the speed-up and rounded again, and only then added.
"""

from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np

from kvyard.engine.timing.model import NS_PER_MS, SHORT, Durations, scaled, scaled_many
from kvyard.errors import KvyardError

# Milliseconds by new tokens, and by the share of the cache in use. The constants are the mocker's, a fit to one H200.
PREFILL = (4.209989e-7, 1.518344e-2, 16.50142)
DECODE = (-25.74, 54.01, 5.74)

_LONGEST: Final = 1024
"""Passes whose numbers are kept, for plans up to that length."""
_NUMBERS = np.arange(_LONGEST, dtype=np.float64)
_A, _B, _C = (np.array(figure) for figure in DECODE)
_NS = np.array(NS_PER_MS)


class PolynomialModel:
    """Needs the capacity of the engine's cache in tokens: decoding slows down as it fills."""

    needs_longest: ClassVar[bool] = False
    __slots__ = ("_batch", "_capacity", "_context", "_decode_ratio", "_prefill_ratio", "_whole")

    def __init__(self, capacity_tokens: int, prefill_ratio: float, decode_ratio: float) -> None:
        if capacity_tokens < 1:
            raise KvyardError(f"timing: polynomial needs the cache's capacity in tokens, got {capacity_tokens}")
        self._capacity = float(capacity_tokens)
        self._whole = np.array(self._capacity)
        self._batch, self._context = np.zeros(()), np.zeros(())
        self._prefill_ratio = prefill_ratio
        self._decode_ratio = decode_ratio

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
        capacity, ratio = self._capacity, self._decode_ratio
        if passes <= SHORT:
            a, b, c = DECODE
            shares = [at / capacity for at in range(context, context + batch * passes, batch)]
            if shares and shares[-1] > 1.0:
                shares = [min(used, 1.0) for used in shares]
            steps = [round((a * used * used + b * used + c) * NS_PER_MS) for used in shares]
            return np.array(steps if ratio == 1.0 else [scaled(ns, ratio) for ns in steps], dtype=np.int64)
        # Most of what such short vectors cost is making them, and turning plain numbers into arrays: so that is done as seldom
        # as can be. Token counts are exact in floats.
        numbers = _NUMBERS[:passes] if passes <= _LONGEST else np.arange(passes, dtype=np.float64)
        used, spent = np.empty(passes), np.empty(passes)
        self._batch[()] = batch
        self._context[()] = context
        np.multiply(numbers, self._batch, used)
        np.add(used, self._context, used)
        np.divide(used, self._whole, used)
        if context + batch * (passes - 1) > capacity:
            np.minimum(used, 1.0, out=used)
        np.multiply(used, _A, spent)
        np.multiply(spent, used, spent)
        np.multiply(used, _B, used)
        np.add(spent, used, spent)
        np.add(spent, _C, spent)
        np.multiply(spent, _NS, spent)
        return scaled_many(np.rint(spent, spent), ratio)

    def _step(self, context: int) -> int:
        # The mocker's floor of 1 ms is left out: the parabola never gets there for shares from 0 to 1.
        a, b, c = DECODE
        used = context / self._capacity
        if used > 1.0:
            used = 1.0
        ns = round((a * used * used + b * used + c) * NS_PER_MS)
        return ns if self._decode_ratio == 1.0 else scaled(ns, self._decode_ratio)


def charged_tokens(prefills: Sequence[tuple[int, int]]) -> int:
    """The tokens that a batch of (new, past) prefills is charged for: batch * (mean length - mean past), means cut to ints."""
    if len(prefills) == 1:
        return prefills[0][0]
    new = past = batch = 0
    for fresh, cached in prefills:
        if fresh:
            new += fresh
            past += cached
            batch += 1
    return batch * ((new + past) // batch - past // batch) if batch else 0
