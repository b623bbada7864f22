"""Timing kinds by name. A kind of one's own is a ``TimingConfig`` under an entry point of group ``kvyard.timing``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvyard.engine.timing.config import TimingConfig
from kvyard.engine.timing.model import TimingModel
from kvyard.errors import KvyardError
from kvyard.registry import Registry

TIMINGS: Registry[type[TimingConfig]] = Registry(
    "timing kind",
    "kvyard.timing",
    {
        "polynomial": "kvyard.engine.timing.polynomial:PolynomialTiming",
        "fixed": "kvyard.engine.timing.fixed:FixedTiming",
        "profile": "kvyard.engine.timing.profile:ProfileTiming",
    },
)


def timing_choices() -> str:
    """How each kind is written as one word, for help and refusals; just the name of one that can't be loaded."""
    usages = []
    for name in TIMINGS.names():
        try:
            usages.append(TIMINGS.get(name).usage())
        except KvyardError:
            usages.append(name)
    return f"{', '.join(usages[:-1])}, or {usages[-1]}"


def parse_timing(text: str, speedup_ratio: float = 1.0) -> TimingConfig:
    """The config that one word such as ``fixed:50,8`` stands for. Raises ``KvyardError``, saying how to write it, if none."""
    name, _, rest = text.partition(":")
    if name not in TIMINGS.names():
        raise KvyardError(f"timing is {text!r}: choose {timing_choices()}")
    return TIMINGS.get(name).parse(rest, speedup_ratio)


def read_timing(value: Mapping[str, Any]) -> TimingConfig:
    """The config that a mapping such as ``{"kind": "polynomial"}`` stands for. Raises ``KvyardError`` if it's wrong."""
    kind = value.get("kind")
    if not isinstance(kind, str):
        raise KvyardError(f"timing: kind must be one of {', '.join(sorted(TIMINGS.names()))}, got {kind!r}")
    try:
        return msgspec.convert(dict(value), TIMINGS.get(kind))
    except msgspec.ValidationError as error:
        raise KvyardError(f"timing: {kind}: {error}") from None


def make_timing(config: TimingConfig | Mapping[str, Any], capacity_tokens: int) -> TimingModel:
    """The model for an engine whose cache holds ``capacity_tokens``. Raises ``KvyardError`` for a config that can't work."""
    if not isinstance(config, TimingConfig):
        config = read_timing(config)
    config.check()
    return config.model(capacity_tokens)
