"""What people write to choose a timing model: one small frozen struct per kind, told apart by ``kind``.

A config is a value. It reads no file and knows no engine; ``kvyard.engine.timing.registry`` makes a model of it.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import msgspec

from kvyard.errors import KvyardError


class TimingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """What every kind has: how much faster than the model says the engine runs."""

    speedup_ratio: float = 1.0
    """Divides every duration."""
    decode_speedup_ratio: float = 1.0
    """Divides what decoding takes once more."""

    def check(self) -> None:
        """Raise ``KvyardError`` if a value makes no sense."""
        for name in ("speedup_ratio", "decode_speedup_ratio"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise KvyardError(f"timing: {name} must be a number above 0, got {value}")


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


class PolynomialTiming(TimingConfig, frozen=True, kw_only=True, tag="polynomial"):
    """The formula of NVIDIA Dynamo's mocker: prefill by new tokens, decode by how full the cache is. Has no options."""


class ProfileTiming(TimingConfig, frozen=True, kw_only=True, tag="profile"):
    """Fitted to measurements: a profile that ships with kvyard, by ``name``, or one of your own, by ``path``."""

    name: str | None = None
    path: str | None = None

    def check(self) -> None:
        super().check()
        if (self.name is None) == (self.path is None):
            raise KvyardError("timing: a profile needs either a name (one that ships with kvyard) or a path, not both")


AnyTiming: TypeAlias = FixedTiming | PolynomialTiming | ProfileTiming
"""For a field of a larger config: msgspec reads the right one by ``kind``."""
