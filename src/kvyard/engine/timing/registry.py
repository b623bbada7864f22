"""The registry of timing models: ``kind`` to a config type and a function that makes the model.

To add one, put a ``Kind`` into ``TIMINGS``; its config type is a ``TimingConfig`` with that kind as its tag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from kvyard.engine.timing.config import FixedTiming, PolynomialTiming, ProfileTiming, TimingConfig
from kvyard.engine.timing.fixed import FixedModel
from kvyard.engine.timing.model import TimingModel
from kvyard.engine.timing.polynomial import PolynomialModel
from kvyard.errors import KvyardError


class Kind(NamedTuple):
    """One kind of timing model."""

    config: type[TimingConfig]
    make: Callable[[Any, int], TimingModel]
    """From a config of that type and the cache's capacity in tokens."""


def _profile(config: ProfileTiming, capacity_tokens: int) -> TimingModel:
    from kvyard.engine.timing.profile import ProfileModel, load_profile

    return ProfileModel(load_profile(name=config.name, path=config.path), config)


TIMINGS: dict[str, Kind] = {
    "fixed": Kind(FixedTiming, lambda config, capacity: FixedModel(config)),
    "polynomial": Kind(PolynomialTiming, PolynomialModel),
    "profile": Kind(ProfileTiming, _profile),
}


def read_timing(value: Mapping[str, Any]) -> TimingConfig:
    """The config that a mapping such as ``{"kind": "polynomial"}`` stands for. Raises ``KvyardError`` if it's wrong."""
    kind = value.get("kind")
    entry = TIMINGS.get(kind) if isinstance(kind, str) else None
    if entry is None:
        raise KvyardError(f"timing: unknown kind {kind!r}; choose one of {', '.join(sorted(TIMINGS))}")
    try:
        return msgspec.convert(dict(value), entry.config)
    except msgspec.ValidationError as error:
        raise KvyardError(f"timing: {kind}: {error}") from None


def make_timing(config: TimingConfig | Mapping[str, Any], capacity_tokens: int) -> TimingModel:
    """The model for an engine whose cache holds ``capacity_tokens``. Raises ``KvyardError`` for a config that can't work."""
    if not isinstance(config, TimingConfig):
        config = read_timing(config)
    config.check()
    kind = config.__struct_config__.tag
    entry = TIMINGS.get(kind) if isinstance(kind, str) else None
    if entry is None:
        raise KvyardError(f"timing: unknown kind {kind!r}; choose one of {', '.join(sorted(TIMINGS))}")
    return entry.make(config, capacity_tokens)
