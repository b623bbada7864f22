"""``fixed``: the same time for every prefill and every decode step. For tests, and to see what scheduling alone does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvyard.clock.units import from_ms
from kvyard.engine.timing.config import FixedTiming
from kvyard.engine.timing.model import Durations, scaled


class FixedModel:
    """A pass takes its prefill time if it computes prompt tokens, plus its decode time if it decodes."""

    __slots__ = ("_decode", "_prefill")

    def __init__(self, config: FixedTiming) -> None:
        self._prefill = scaled(from_ms(config.prefill_ms), config.speedup_ratio)
        self._decode = scaled(from_ms(config.decode_ms), config.speedup_ratio * config.decode_speedup_ratio)

    def pass_ns(self, prefills: Sequence[tuple[int, int]], decode_batch: int, decode_context: int) -> int:
        ns = self._decode if decode_batch else 0
        for new, _ in prefills:
            if new:
                return ns + self._prefill
        return ns

    def decode_ns(self, batch: int, context: int, passes: int) -> Durations:
        return np.full(passes, self._decode if batch else 0, dtype=np.int64)
