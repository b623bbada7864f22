"""``fixed``: the same time for every prefill and every decode step. For tests, and to see what scheduling alone does."""

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from kvyard.clock import from_ms
from kvyard.engine.timing.model import Durations, scaled
from kvyard.engine.timing.registry import TimingConfig
from kvyard.errors import KvyardError


class FixedTiming(TimingConfig, frozen=True, kw_only=True, tag="fixed"):
    """A pass takes ``prefill_ms`` if it computes prompt tokens, plus ``decode_ms`` if it decodes, whatever the sizes."""

    prefill_ms: float
    decode_ms: float

    def check(self) -> None:
        super().check()
        for name in ("prefill_ms", "decode_ms"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise KvyardError(f"timing: {name} must be a number of milliseconds, 0 or more, got {value}")

    def describe(self) -> str:
        return (
            f"fixed, {self.prefill_ms:g} ms for prompts and {self.decode_ms:g} ms for decode steps, whatever their size"
        )

    def model(self, capacity_tokens: int) -> "FixedModel":
        return FixedModel(self)


class FixedModel:
    """The durations of ``FixedTiming``."""

    needs_longest: ClassVar[bool] = False
    __slots__ = ("_decode", "_prefill")

    def __init__(self, config: FixedTiming) -> None:
        self._prefill = scaled(from_ms(config.prefill_ms), config.speedup_ratio)
        self._decode = scaled(from_ms(config.decode_ms), config.speedup_ratio * config.decode_speedup_ratio)

    def pass_ns(self, prefills: Sequence[tuple[int, int]], decode_batch: int, decode_context: int, longest: int) -> int:
        ns = self._decode if decode_batch else 0
        for new, _ in prefills:
            if new:
                return ns + self._prefill
        return ns

    def decode_ns(self, batch: int, context: int, passes: int, longest: int) -> Durations:
        return np.full(passes, self._decode if batch else 0, dtype=np.int64)
